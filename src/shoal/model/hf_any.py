"""Any causal model of transformers as a net that Shoal trains (`model.hf`): its own class, asked for logits alone.

What its class does between hidden states and logits (a scale, a cap, a bias) is not guessed: the head is tried against
the class's own logits, with weights large enough for a cap to be seen, and only where both agree is the loss taken in
chunks, without all logits at once.
"""

from __future__ import annotations

import inspect
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.errors import DataError, SetupError, SpecError
from shoal.model.decoder import Decoder
from shoal.model.head import summed_cross_entropy
from shoal.model.hf import new_folder, whole_or_none
from shoal.model.hf_tokenizer import save_tokenizer
from shoal.model.objective import Objective
from shoal.model.own_model import OwnModel, maker
from shoal.spec.hf.folder import CONFIG
from shoal.spec.run import Run
from shoal.spec.shape import Shape

if TYPE_CHECKING:
    from shoal.data.tokenizer import Tokenizer

LOUD = 1.0  # the spread of a head's weights through which a cap on logits shows


class Hf:
    called = "model.hf"

    def __init__(self, net: nn.Module) -> None:
        known = inspect.signature(net.forward).parameters
        self._positions = "position_ids" in known
        self._cache = "use_cache" in known
        self._plain_head = self._head_is_all(net)
        # Of hidden states, the head's weights and targets; another where processes have parts of the vocabulary.
        self.cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor] = summed_cross_entropy

    def logits(self, net: nn.Module, tokens: Tensor, positions: Tensor, documents: Tensor | None) -> Any:
        return net(input_ids=tokens, **self._about(positions)).logits

    def loss(
        self, net: nn.Module, tokens: Tensor, positions: Tensor, documents: Tensor | None, targets: Tensor
    ) -> Tensor | None:
        if not self._plain_head:
            return None
        return self.cross_entropy(self._hidden(net, tokens, positions), head_of(net).weight, targets)

    def _about(self, positions: Tensor) -> dict[str, Any]:
        # Positions that begin anew tell transformers where a document begins; a cache would be of no use here.
        return ({"position_ids": positions} if self._positions else {}) | ({"use_cache": False} if self._cache else {})

    def _hidden(self, net: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = net.base_model(input_ids=tokens, **self._about(positions))[0]  # type: ignore[operator]
        return hidden

    @torch.no_grad()
    def _head_is_all(self, net: nn.Module) -> bool:
        head, inner = head_of(net), getattr(net, "base_model", net)
        if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None or inner is net:
            return False
        kept, trained = head.weight.clone(), net.training
        tokens = torch.arange(8)[None] % head.weight.shape[0]
        net.eval()
        head.weight.normal_(std=LOUD, generator=torch.Generator().manual_seed(0))
        try:
            wanted = self.logits(net, tokens, torch.arange(8)[None], None)
            hidden = self._hidden(net, tokens, torch.arange(8)[None])
            return hidden.shape[-1] == head.weight.shape[1] and torch.allclose(head(hidden), wanted, rtol=1e-5)
        finally:
            head.weight.copy_(kept)
            net.train(trained)


def make_net(run: Run) -> nn.Module:
    """The class that its config means, with start values of its own."""
    transformers = _transformers()
    text = run.model.hf_config
    if text is None:
        raise SpecError("model.hf_config is not known yet: load the run file, or set it to the text of config.json.")
    try:
        with tempfile.TemporaryDirectory() as folder:  # the way by which transformers reads all that it has written
            (Path(folder) / CONFIG).write_text(text)
            settings = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError, OSError) as e:
        words = str(e).strip().splitlines()[0][:200] if str(e).strip() else type(e).__name__
        raise SpecError(
            f"transformers {transformers.__version__} makes no causal model of {run.model.hf}: {words}"
        ) from e


def model_of(run: Run, shape: Shape, objective: Objective | None = None) -> OwnModel:
    made = maker(make_net, run, Hf.called)
    first: list[nn.Module] = [made()]
    way = Hf(first[0])
    return OwnModel(lambda: first.pop() if first else made(), shape, way, objective)


def load_weights(model: Decoder, folder: str) -> None:
    """Those of the folder, where it has any: a config alone begins with start values."""
    if not any(Path(folder).glob("*.safetensors")):
        if any(Path(folder).glob("*.bin")):
            raise DataError(f"{folder} has pickled weights (*.bin), which Shoal never opens: get them as safetensors.")
        return
    assert isinstance(model, OwnModel)
    model.take(_stored(Path(folder)))


def _stored(folder: Path) -> nn.Module:
    transformers = _transformers()
    try:
        net, about = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as e:
        raise DataError(
            f"{folder}: transformers cannot read its weights: {str(e).strip().splitlines()[0][:200]}"
        ) from e
    wrong = {
        kind: sorted(map(str, about.get(kind) or ())) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    for kind, names in wrong.items():
        if names:
            raise DataError(
                f"{folder}: of its weights {len(names)} are {kind.removesuffix('_keys')}, such as {names[0]}."
            )
    return net.float().train()


def save_folder(
    folder: str | os.PathLike[str],
    run: Run,
    shape: Shape,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    like: str | os.PathLike[str] | None,
    dtype: torch.dtype | None,
) -> None:
    """As `shoal.model.hf` does, of a class that transformers alone has; it writes its own config and names."""
    folder = new_folder(folder)
    model = model_of(run, shape)
    model.fill(tensors)
    with whole_or_none(folder) as work:
        (model.net if dtype is None else model.net.to(dtype)).save_pretrained(work)  # type: ignore[operator]
        config = json.loads((work / CONFIG).read_text())
        config |= save_tokenizer(work, shape, tokenizer, Path(like) if like else None)
        (work / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def head_of(net: nn.Module) -> Any:
    """The module that makes logits of hidden states, where the class says which."""
    asked: Callable[[], Any] = net.get_output_embeddings  # type: ignore[assignment]
    return asked()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise SetupError(
            "model.hf is trained by transformers, which is not installed: `pip install 'shoal[hf]'`."
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers

"""Shoal's engine as a model of lm-eval, so that all of its tasks can be asked where their data is.

  shoal eval lm-eval FOLDER -- --tasks arc_easy --limit 100

Imported only where lm-eval is: it registers the name `shoal` there. For a program of your own:

  lm_eval.simple_evaluate(model=ShoalLM(of="FOLDER"), tasks=["arc_easy"])
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from shoal.errors import DataError, UsageError
from shoal.evaluate.ask import GROUP
from shoal.evaluate.model import Local
from shoal.evaluate.questions import Question
from shoal.evaluate.task import Until
from shoal.evaluate.task_file import until_of
from shoal.generate.chat_template import template_of
from shoal.generate.opened import Opened, Wanted, of_folder, of_run
from shoal.journal.rundir import find_run, workspace
from shoal.values import BadValue

BATCH = 16


@register_model("shoal")
class ShoalLM(LM):
    def __init__(
        self,
        of: str,
        step: int | None = None,
        workspace_dir: str | None = None,
        tokenizer: str | None = None,
        start: str | None = None,
        exact: bool = False,
        own_code: bool = False,
        device: str | None = None,
        batch_size: int | str | None = None,
        **more: Any,
    ) -> None:
        """`of` is a run or a Hugging Face folder; the others as of `shoal eval`."""
        super().__init__()
        more.pop("max_batch_size", None)
        if more:
            raise UsageError(
                f"{min(more)} is none of the model arguments that Shoal knows: of, step, exact, tokenizer."
            )
        kind = "cpu" if str(device).startswith("cpu") else "auto"  # lm-eval says cuda where nobody said anything
        wanted = Wanted(kind, step, tokenizer, start, True, own_code)
        folder = Path(of)
        is_folder = (folder / "config.json").is_file()
        opened = of_folder(folder, wanted) if is_folder else of_run(find_run(of, workspace(workspace_dir)), wanted)
        batch = int(str(batch_size)) if str(batch_size).isdecimal() else BATCH
        self.local = Local(opened, max(1, batch), exact)

    @property
    def opened(self) -> Opened:
        return self.local.opened

    @property
    def max_length(self) -> int:
        return self.local.encoder.context

    @property
    def tokenizer_name(self) -> str:
        return self.opened.name

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        asked = [Question(n, ((one.args[0], one.args[1]),), ()) for n, one in enumerate(requests)]
        # Those with one context beside each other: it is computed once for all of them.
        order = sorted(range(len(asked)), key=lambda n: (len(asked[n].asks[0][0]), asked[n].asks[0][0], n))
        found: dict[int, tuple[float, bool]] = {}
        for part in _parts(order, 4 * GROUP):
            for n, (score,) in zip(part, self.local.judged([asked[n] for n in part]), strict=True):
                found[n] = score
                self.cache_hook.add_partial("loglikelihood", requests[n].args, score)
        return [found[n] for n in range(len(asked))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        found: list[float] = []
        asked = [Question(n, (("", one.args[0]),), ()) for n, one in enumerate(requests)]
        for part in _parts(range(len(asked)), GROUP):
            found += [score for score, _ in self.local.rolled([asked[n] for n in part])]
        assert all(map(math.isfinite, found))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        found: dict[int, str] = {}
        by_way: dict[Until, list[int]] = {}
        for n, one in enumerate(requests):
            by_way.setdefault(_until(one.args[1]), []).append(n)
        for until, numbers in by_way.items():
            for part in _parts(numbers, 2 * self.local.batch):
                asked = [Question(n, ((requests[n].args[0], ""),), ()) for n in part]
                for n, answer in zip(part, self.local.written(asked, until), strict=True):
                    found[n] = answer
                    self.cache_hook.add_partial("generate_until", requests[n].args, answer)
        return [found[n] for n in range(len(requests))]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if chat_template is False or chat_template is None:
            return None
        return self._template(None if chat_template is True else str(chat_template)).source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            more: dict[str, Any] = {"continue_final_message": True}
            raise DataError(f"gen_prefix ({more}) is not known to Shoal's chat templates; leave it out of the task.")
        (text,) = self._template(None).rendered([chat_history])
        return text

    def _template(self, name: str | None) -> Any:
        folder = self.opened.folder
        found = None if folder is None else template_of(folder, self.opened.tokenizer, name)
        if found is None:
            raise DataError(f"{self.opened.name} brings no chat template; leave out --apply_chat_template.")
        return found


def _until(said: Any) -> Until:
    try:
        return until_of(said, "")
    except BadValue as e:
        raise DataError(f"generation_kwargs: {e}.") from None


def _parts(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for at in range(0, len(numbers), size):
        yield numbers[at : at + size]

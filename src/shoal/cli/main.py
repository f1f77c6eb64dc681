"""`shoal VERB …`: finds the verb, runs it, turns errors into one sentence and an exit code.

Verbs are imported only when called, so `shoal --help` stays far under 0.3 s (no torch, no pydantic, no rich).
A verb is a module `shoal.cli.VERB` with `add_arguments(parser)` and `run(args) -> int | None`; with
`TAKES_OVERRIDES = True` it finds the values for the run file (`train.steps=100`) in `args.overrides`; `OWN_OPTIONS`
names those of its options, with a value each, that would be taken for such values (`--seed`).
"""

from __future__ import annotations

import argparse
import errno
import importlib
import re
import sys

from shoal import __version__, streams
from shoal.errors import TOLD_TO_STOP, TRANSIENT, WRONG_ENVIRONMENT, ShoalError, UsageError
from shoal.leaving import leave_at_once
from shoal.near import closest
from shoal.plain_file import NotPlain
from shoal.values import BadValue

GROUPS = {
    "begin": {
        "init": "write a run file to start from",
        "data": "turn text into token shards, train a tokenizer, look at a data set",
        "show": "print the resolved run file and where each value came from",
        "plan": "predict speed, memory, cost and goodput, and find the best layout",
        "check": "train a few steps in several ways: does own code repeat, resume and split exactly?",
        "adopt": "read a training script of yours: what is wrong with it, measured and mended where that is possible",
    },
    "train": {
        "train": "train on this machine, all its devices",
        "run": "run a training script of yours under Shoal's supervisor",
        "batch": "run one command over many units, each of which is done once",
        "launch": "send a run to Slurm, Kubernetes, Ray, or this machine in the background",
        "swarm": "train one model with peers anywhere: create, join, invite, status, leave, relay",
        "sweep": "many runs of one run file: a grid or random search, the worst stopped early",
    },
    "watch and steer": {
        "ps": "list the runs and what each is doing; of one: why it waits, died, what it cost",
        "logs": "print or follow the logs of a run",
        "stop": "stop a run; its state is saved first",
        "resume": "go on with a run that stopped or failed",
        "report": "where the time went, the curves, what failed; several runs in one picture",
    },
    "use the result": {
        "sample": "generate text from a run's newest checkpoint",
        "eval": "measure a model on tasks, with intervals; say which of two is better",
        "checkpoint": "list, verify, compare, delete, export, import and join checkpoints",
        "track": "upload what a tracker has not received yet",
    },
    "look deeper": {
        "bench": "measure this machine; the planner reads the result",
        "profile": "trace a few steps: where the time goes, the worst kernels, what to fix next",
        "drill": "break a real run on purpose and report what it cost",
    },
}
VERBS = {verb: summary for group in GROUPS.values() for verb, summary in group.items()}
START = """\
new here? In an empty folder:
  shoal init pretrain                                          writes pretrain.yaml, which says what to do next
  shoal data prepare TEXT… --eval-fraction 0.05 --out data     your text (files or folders) as tokens
  shoal train pretrain.yaml                                    then `shoal report pretrain`"""


# What they print is all they are for: they end once their reader is gone. All others do their work to its end, whatever
# becomes of what they print, and their exit code is that of the work.
VIEWS = (["ps"], ["logs"], ["show"], ["report"], ["sample"], ["data", "look"], ["swarm", "status"])
# What they did is in a run directory, where it can be seen when nothing could be printed.
RUNS = ("train", "run", "batch", "resume", "launch", "sweep", "drill", "swarm", "stop")
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)  # no retry helps


def main(argv: list[str] | None = None) -> int:
    """Without `argv` it is what this process was started for; then a verb that keeps a journal leaves at once."""
    if argv is not None:
        return _code(argv)
    words = sys.argv[1:]
    view = words[:1] in VIEWS or words[:2] in VIEWS
    streams.steady(stdout=not view)
    code = _printed(_code(words), words)
    if words[:1] in (["train"], ["run"], ["batch"], ["resume"]):
        leave_at_once(code)
    return code


def _printed(code: int, words: list[str]) -> int:
    """The exit code, once what was printed has been handed out: a file with half of a table is no success."""
    lost = streams.finish()
    if lost is None or code or (words[:1] and words[0] in RUNS) or streams.reader_is_gone(lost):
        return code
    print(f"shoal: what it printed could not be written: {lost.strerror}.", file=sys.stderr)
    return TRANSIENT


def _code(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"shoal {__version__}")
        return 0
    argv, after = _cut(argv)
    debug = "--debug" in argv
    argv = [a for a in argv if a != "--debug"]
    try:
        return _run_verb(argv, after)
    except ShoalError as e:
        if debug:
            raise
        print(f"shoal: {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        print("shoal: stopped.", file=sys.stderr)
        return TOLD_TO_STOP
    except BrokenPipeError:  # `shoal logs | head`
        return 0
    except (BadValue, NotPlain) as e:
        if debug:
            raise
        print(f"shoal: {e}; mend it or move it away.", file=sys.stderr)
        return WRONG_ENVIRONMENT
    except OSError as e:
        if debug:
            raise
        where = f" ({e.filename})" if e.filename else ""
        print(f"shoal: the system said: {e.strerror or e}{where}.", file=sys.stderr)
        return WRONG_ENVIRONMENT if e.errno in _FORBIDDEN else TRANSIENT
    except Exception as e:
        if debug:
            raise
        print(
            f"shoal: this is a defect in Shoal: {type(e).__name__}: {e}; run it again with --debug and report it.",
            file=sys.stderr,
        )
        return TRANSIENT


def _cut(argv: list[str]) -> tuple[list[str], list[str]]:
    """The words for Shoal, and those that belong to somebody's script."""
    if argv[0] not in ("run", "adopt", "batch"):
        return argv, []
    from shoal.cli.run import cut

    options = importlib.import_module(f"shoal.cli.{argv[0]}").OPTIONS
    ours, after = cut(argv[1:], options)
    return [argv[0], *ours], after


def _run_verb(argv: list[str], after: list[str]) -> int:
    verb = argv[0]
    if verb not in VERBS:
        raise UsageError(f"there is no verb '{verb}'; {_verb_hint(verb)}")
    module = importlib.import_module(f"shoal.cli.{verb}")
    parser = Parser(
        prog=f"shoal {verb}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    rest, overrides = argv[1:], None
    if getattr(module, "TAKES_OVERRIDES", False):
        from shoal.spec.overrides import split_overrides

        rest, overrides = split_overrides(rest, getattr(module, "OWN_OPTIONS", ()))
    args = parser.parse_args(rest)
    args.overrides, args.after = overrides, after
    return int(module.run(args) or 0)


def _verb_hint(verb: str) -> str:
    from shoal.spec.elsewhere import VERBS_ANSWERED, VERBS_CALLED

    plain = verb.lower()
    if plain in VERBS_CALLED:
        return f"it is `shoal {VERBS_CALLED[plain]}`."
    if plain in VERBS_ANSWERED:
        return f"{VERBS_ANSWERED[plain]}."
    if plain.endswith((".yaml", ".yml")):
        return f"`shoal train {verb}` trains that run file, `shoal show {verb}` prints it."
    near = closest(verb, VERBS)
    return f"did you mean `shoal {near}`?" if near else "`shoal --help` lists them."


class Parser(argparse.ArgumentParser):
    """argparse, with our one-sentence errors instead of its usage dump."""

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse says NoReturn; raising is that
        option, _, value = message.removeprefix("unrecognized arguments: ").replace("=", " ").partition(" ")
        if message.startswith("unrecognized") and value and (option.startswith("--") or "." in option):
            from shoal.spec.names import meant

            verb = importlib.import_module(f"shoal.cli.{self.prog.split()[1]}")
            if getattr(verb, "TAKES_OVERRIDES", False) and (name := meant(option.lstrip("-"))):
                raise UsageError(f"{message}; did you mean `{name}={value.split()[0]}`?")
        raise UsageError(_plainly(message, self.prog))


def _plainly(message: str, prog: str) -> str:
    """What argparse says, as a person would: what is missing, or which choice was meant."""
    see = f"see `{prog} --help`."
    if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
        if "|" in missing[1]:
            return f"say what to do: `{prog} {missing[1]}`; {see}"
        names = missing[1].split(", ")
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing; {see}"
    if wrong := re.fullmatch(r"argument (.+): invalid choice: '(.*)' \(choose from (.*)\)", message):
        option, given, choices = wrong.groups()
        what = f"`{prog} {given}`" if "|" in option else f"'{given}' for {option}"
        known = re.findall(r"[\w.-]+", choices)
        near = closest(given, known)
        return f"there is no {what}; " + (f"did you mean {near}?" if near else f"there are {', '.join(known)}; {see}")
    return f"{message}; {see}"


def _help() -> str:
    width = max(map(len, VERBS))
    groups = "\n\n".join(
        "\n".join([f"{name}:", *(f"  {verb:<{width}}  {summary}" for verb, summary in group.items())])
        for name, group in GROUPS.items()
    )
    return (
        "usage: shoal VERB … [--debug]\n\n"
        "Trains language models on whatever machines you have.\n\n"
        f"{START}\n\n{groups}\n\n"
        "`shoal VERB --help` says more. Values of the run file are set as `train.steps=100` or `--train.steps 100`.\n"
        "Exit codes: 0 done, 2 wrong usage, 75 may be retried, 78 wrong environment or data, 143 stopped and saved."
    )


if __name__ == "__main__":
    sys.exit(main())

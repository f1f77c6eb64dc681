"""Write a run file to start from.

`shoal init pretrain` writes pretrain.yaml; `shoal init finetune mine.yaml` another name; `shoal init --list` lists the
templates. Beside it, .shoal/run.schema.json lets an editor complete and check the names while you type.
"""

from __future__ import annotations

import argparse
import re
from importlib.resources import files
from pathlib import Path

from shoal.errors import SetupError, UsageError
from shoal.near import closest
from shoal.spec.run import NAME_PATTERN
from shoal.spec.schema import schema_text

SCHEMA = Path(".shoal/run.schema.json")  # the templates name it, relative to themselves


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("template", nargs="?", metavar="TEMPLATE", help="which one: " + ", ".join(templates()))
    parser.add_argument("file", nargs="?", metavar="FILE", help="where to write it (default: TEMPLATE.yaml)")
    parser.add_argument("--list", action="store_true", help="list the templates")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def run(args: argparse.Namespace) -> int:
    known = templates()
    if args.list:
        width = max(map(len, known))
        print("\n".join(f"{name:<{width}}  {about(text)}" for name, text in known.items()))
        return 0
    if args.template is None:
        raise UsageError("which template? `shoal init pretrain` trains from scratch, `--list` lists them all.")
    if args.template not in known:
        near = closest(args.template, known)
        hint = f"did you mean {near}?" if near else f"there are {' and '.join(known)}."
        raise UsageError(f"there is no template '{args.template}'; {hint}")
    file = Path(args.file or f"{args.template}.yaml")
    write(file, filled(known[args.template], file), force=args.force)
    print(f"{file} written. Next: read it (it says how to prepare the data), then `shoal show {file}`.")
    return 0


def templates() -> dict[str, str]:
    """Name to text."""
    folder = files("shoal.spec").joinpath("templates")
    found = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    return {f.name.removesuffix(".yaml"): f.read_text(encoding="utf-8") for f in found}


def about(text: str) -> str:
    return text.splitlines()[1].lstrip("# ")


def filled(text: str, file: Path) -> str:
    """The template for this file: the run is named after it, and the commands in the comments are those to type."""
    name = file.stem if re.fullmatch(NAME_PATTERN, file.stem) else "run"
    put = {"NAME": name, "FILE": file.name}
    return re.sub(r"^name: \S+|\bNAME\b|\bFILE\b", lambda m: put.get(m[0], f"name: {name}"), text, flags=re.MULTILINE)


def write(file: Path, text: str, force: bool) -> None:
    if file.is_dir():
        raise UsageError(f"{file} is a folder; give the name of a file in it, such as {file / 'run.yaml'}.")
    if file.exists() and not force:
        raise UsageError(f"{file} exists; give another name, or --force to overwrite it.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        schema = file.parent / SCHEMA
        schema.parent.mkdir(exist_ok=True)
        schema.write_text(schema_text(), encoding="utf-8")
    except OSError as e:
        raise SetupError(f"{e.filename or file} cannot be written ({e.strerror}); choose another place.") from None

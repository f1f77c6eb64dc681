"""The house has rooms in an order, and imports point downwards: those inside functions too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import shoal

SOURCE = Path(shoal.__file__).parent
# Lowest first (docs/architecture.md says what each is for). Modules beside them are leaves: they import leaves alone.
ROOMS = (
    *("devices", "spec", "kernels", "net", "codec", "emulate", "journal", "own", "plan", "observe", "data", "model"),
    *(
        "parallel",
        "checkpoint",
        "script",
        "decide",
        "track",
        "guard",
        "batch",
        "drill",
        "check",
        "adopt",
        "bench",
    ),
    *("generate", "evaluate", "train", "launch", "islands", "swarm", "stages", "profile", "cli"),
)
# Of the whole house: they open every room, and no room goes through them.
DOORS = ("__init__", "__main__", "api", "api_page", "hf")


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The modules of ours that are imported anywhere in a file, and where. What only types are read from
    (`if TYPE_CHECKING`) is never imported while a program runs, and does not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name their module in full"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        yield from imports(node)


def height(name: str) -> int:
    """Of a room, a leaf, or what `import shoal` offers to others."""
    if name in ROOMS:
        return ROOMS.index(name) + 1
    leaf = name == "__version__" or (name not in DOORS and (SOURCE / f"{name}.py").exists())
    return 0 if leaf else len(ROOMS) + 1


def upwards(source: Path) -> list[str]:
    found = []
    for file in sorted(source.rglob("*.py")):
        here = file.relative_to(source).with_suffix("").parts
        if here[0] in DOORS:
            continue
        for module, line in imports(ast.parse(file.read_text())):
            house, _, rest = module.partition(".")
            room = rest.split(".")[0]
            if house == "shoal" and height(room) > height(here[0]):
                found.append(f"{'/'.join(here)}.py:{line} imports {module}, and {room} stands above {here[0]}")
    return found


def test_every_package_is_a_room_with_a_place_in_the_order() -> None:
    packages = {file.parent.name for file in SOURCE.glob("*/*.py")}
    assert packages - set(ROOMS) == set(), "give it a place in ROOMS and in docs/architecture.md"
    assert set(ROOMS) - packages == set(), "they are gone"


def test_no_import_points_upwards() -> None:
    assert upwards(SOURCE) == []


def test_an_import_upwards_is_seen_wherever_it_stands(tmp_path: Path) -> None:
    for name, text in {
        "near.py": "import shoal.spec.run\n",
        "spec/run.py": "def f():\n    from shoal.checkpoint import find\n",
        "plan/step.py": "from shoal.spec import run\nif TYPE_CHECKING:\n    from shoal.train import step\n",
        "spec/mesh.py": "from shoal import __version__, near\nfrom shoal import load\n",
        "__main__.py": "from shoal.cli.main import main\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [line.partition(" ")[0] for line in upwards(tmp_path)] == ["near.py:1", "spec/mesh.py:2", "spec/run.py:2"]

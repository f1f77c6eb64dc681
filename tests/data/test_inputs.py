"""What people name as input: links, loops, pipes, sockets, devices and odd names are looked at before opening."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.data.prepare.bad_input import Problems
from shoal.data.prepare.inputs import Input, expand
from shoal.data.prepare.readers_tables import table_pieces
from shoal.data.prepare.units import Reading
from shoal.errors import DataError
from tests.data.preparing import read_texts


def names(*named: Path | str) -> list[str]:
    inputs, _ = expand([str(n) for n in named])
    return [Path(one.path).name for one in inputs]


def test_links_to_the_folder_they_are_in_make_no_loop(tmp_path: Path) -> None:
    """Two of them are 2^40 ways through the folder for whoever follows links."""
    (tmp_path / "sub" / ".hidden").mkdir(parents=True)
    for where in (tmp_path, tmp_path / "sub"):
        (where / "a.txt").write_text(f"whale {where}")
        (where / "again").symlink_to(where)
        (where / "more").symlink_to(tmp_path)
    (tmp_path / "sub" / ".hidden" / "b.txt").write_text("secret")
    (tmp_path / "sub" / ".c.txt").write_text("secret")
    assert names(tmp_path) == ["a.txt", "a.txt"]
    assert names(f"{tmp_path}/**/*.txt") == ["a.txt", "a.txt"]
    assert names(f"{tmp_path}/**/a.*") == ["a.txt", "a.txt"]
    with pytest.raises(DataError, match="named twice"):  # `*` follows a link, once
        names(f"{tmp_path}/*/*.txt")
    assert names(f"{tmp_path}/sub/**") == ["a.txt"]


@pytest.mark.parametrize("kind", ["socket", "fifo", "device", "loop"])
def test_what_is_no_file_is_refused_and_not_opened(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    if kind == "socket":
        monkeypatch.chdir(tmp_path)  # the name of a socket is short
        socket.socket(socket.AF_UNIX).bind("a.txt")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to(path)
    for named in (path, tmp_path):
        assert main(["data", "prepare", str(named), "--out", str(tmp_path / "out")]) == 78
        err = capsys.readouterr().err
        assert f"{path} is no regular file" in err or f"{path} cannot be read: Too many levels" in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_file_that_becomes_a_pipe_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.data.prepare import data_set

    planned = data_set.plan_units

    def plan_then_swap(*arguments: object) -> object:
        found = planned(*arguments)  # type: ignore[arg-type]
        (tmp_path / "a.txt").unlink()
        os.mkfifo(tmp_path / "a.txt")
        return found

    (tmp_path / "a.txt").write_text("whale")
    monkeypatch.setattr(data_set, "plan_units", plan_then_swap)
    assert main(["data", "prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]) == 78
    assert "a.txt cannot be read (is a FIFO, where a file should be)" in capsys.readouterr().err


@pytest.mark.parametrize("name", [b"new\nline.jsonl", b"es\x1b[31mcape.jsonl", b"\xff\xfe.jsonl"])
def test_odd_names_are_read_and_stay_on_one_line(
    name: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = os.fsencode(tmp_path / "in") + b"/" + name
    os.mkdir(tmp_path / "in")
    Path(os.fsdecode(path)).write_text('{"text": "whale"}\n{"text": 7}\n')
    arguments = ["data", "prepare", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 78
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1
    assert "\x1b" not in err
    assert ".jsonl:2 has a number in the field 'text'" in err
    assert main([*arguments, "--skip-bad"]) == 0
    assert "field is not text, first at" in capfd.readouterr().out
    assert read_texts(tmp_path / "out") == ["whale"]


@pytest.mark.parametrize("ending", [".bz2", ".xz", ".zip", ".tar"])
def test_archives_that_are_not_read_are_refused_by_what_to_do(ending: str, tmp_path: Path) -> None:
    (tmp_path / f"a.jsonl{ending}").write_bytes(b"whatever")
    with pytest.raises(DataError, match="is packed in a way that is not read; unpack it first"):
        expand([str(tmp_path / f"a.jsonl{ending}")])


def test_a_dataset_dict_of_nonsense_is_refused(tmp_path: Path) -> None:
    for said in ('{"splits": 5}', '{"splits": [5]}', "[" * 100_000, "[]", '{"splits": {"a": 1}}'):
        (tmp_path / "dataset_dict.json").write_text(said)
        with pytest.raises(DataError, match=r"dataset_dict\.json is not what `datasets` writes"):
            expand([str(tmp_path)])


def test_fields_of_any_name_stay_in_one_short_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"x" * 5000: 1, "new\nline": 2, "\x1b[31m": 3}) + "\n")
    assert main(["data", "prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]) == 78
    err = capsys.readouterr().err
    assert "has no field 'text' (it has " + "x" * 40 + ", new\\nline, \\x1b[31m)" in err
    assert len(err.splitlines()) == 1


def test_a_column_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["whale"], "nameless": [1]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"nameless", b"name\xffess"))
    one = Input(str(path), "parquet", "", path.stat().st_size)
    with pytest.raises(DataError, match=r"a\.parquet is no Parquet file that can be read \(a column's name is no text"):
        list(table_pieces(one, Reading(), 1 << 20, Problems(skip=False)))

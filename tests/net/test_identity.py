"""A key appears whole or not at all, and signatures hold for the canonical form alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from shoal.errors import SetupError
from shoal.net.identity import Identity, canonical, is_peer, verify_json


def test_a_key_is_made_once_and_kept_from_others(tmp_path: Path) -> None:
    file = tmp_path / "swarm" / "peer.key"
    made: list[Identity] = []
    at_once = [threading.Thread(target=lambda: made.append(Identity.at(file))) for _ in range(8)]
    for t in at_once:
        t.start()
    for t in at_once:
        t.join()
    assert len({i.id for i in made}) == 1
    assert is_peer(made[0].id)
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(file.parent) == ["peer.key"]
    assert made[0].secret.hex() not in repr(made[0])


def test_a_damaged_or_open_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "peer.key"
    Identity.at(file)
    file.chmod(0o644)
    with pytest.raises(SetupError, match="chmod 600"):
        Identity.at(file)
    file.chmod(0o600)
    file.write_text(file.read_text()[:-5])
    with pytest.raises(SetupError, match="damaged"):
        Identity.at(file)


def test_signatures_are_of_the_canonical_form() -> None:
    me, other = Identity.new(), Identity.new()
    signature = me.sign_json({"b": 1, "a": ["ü", None]})
    assert verify_json(me.id, {"a": ["ü", None], "b": 1}, signature)
    assert not verify_json(me.id, {"a": ["ü", None], "b": 2}, signature)
    assert not verify_json(other.id, {"a": ["ü", None], "b": 1}, signature)
    for forged in ("", "zz", signature[:-2], "00" * 64):
        assert not verify_json(me.id, {"a": ["ü", None], "b": 1}, forged)
    assert not verify_json("no key", {}, signature)
    with pytest.raises(ValueError):
        canonical({"x": float("nan")})

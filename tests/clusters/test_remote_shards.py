"""Data sets on a real S3 server: uploaded, read by a training order, and every wrong address named in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.data.reading import EOS, write_data_set
from tests.patience import Stopwatch
from tests.services import S3Server, s3_server

from shoal.data.feed import Feed
from shoal.data.index import PIECE_BYTES
from shoal.data.order import Order
from shoal.data.remote import RemoteFolder, upload
from shoal.data.shards import TokenShards
from shoal.data.windows import Windows
from shoal.errors import DataError, SetupError, TransientError

pytestmark = pytest.mark.cluster
BUCKET = "corpora"
URL = f"s3://{BUCKET}/sets/prose"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("seaweed")) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture(autouse=True)
def environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def prepared(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight shards, 32 MB with their masks: more than the smallest cache, and one file of several multipart parts."""
    folder = tmp_path_factory.mktemp("prepared")
    rng = np.random.default_rng(0)
    shards = [[[*rng.integers(0, 256, 27_499).tolist(), EOS] for _ in range(40)] for _ in range(7)]
    shards.append([[*rng.integers(0, 256, 3_000_000).tolist(), EOS]])
    masks = [[rng.integers(0, 2, len(document)) for document in shard] for shard in shards]
    write_data_set(folder, shards, masks)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        upload(folder, URL)
    return folder


def test_training_windows_from_s3_equal_those_of_the_folder(prepared: Path, tmp_path: Path) -> None:
    tokens = []
    for where in (str(prepared), URL):
        windows = Windows([TokenShards.open(where, tmp_path / "cache")], 512, True)
        with Feed(windows, Order(windows.sizes, [1.0], 1), 32, micro_batch=8) as feed:
            tokens.append([getattr(b, n) for t in (0, 1, 10**9) for b in feed.step(t) for n in ("tokens", "targets")])
    assert all(np.array_equal(a, b) for a, b in zip(*tokens, strict=True))
    TokenShards.open(URL, tmp_path / "cache").verify()


def test_a_data_set_larger_than_the_cache_stays_within_it(prepared: Path, tmp_path: Path) -> None:
    local, limit = TokenShards.open(prepared), 10_000_000
    remote = TokenShards.open(URL, tmp_path / "cache", limit)
    assert local.index.size_bytes > 2 * limit
    pair = [Windows([data], 512, True) for data in (local, remote)]
    rng = np.random.default_rng(3)
    for _ in range(6):
        picks = rng.integers(0, pair[0].sizes[0], 32)
        batches = [w.batch(np.zeros(32, int), picks) for w in pair]
        assert np.array_equal(batches[0].targets, batches[1].targets)
        assert isinstance(remote.folder, RemoteFolder)
        assert 0 < remote.folder.cache.used_bytes() <= limit


def test_a_damaged_object_is_refused(prepared: Path, tmp_path: Path, server: S3Server) -> None:
    import boto3

    url = f"s3://{BUCKET}/sets/damaged"
    upload(prepared, url)
    content = bytearray((prepared / "shard-00002.tokens").read_bytes())
    client = boto3.client("s3", endpoint_url=server.endpoint)
    data = TokenShards.open(url, tmp_path / "cache")
    at = int(data.starts[2])
    content[10] ^= 1
    client.put_object(Bucket=BUCKET, Key="sets/damaged/shard-00002.tokens", Body=bytes(content))
    with pytest.raises(DataError, match=r"sets/damaged/shard-00002\.tokens has a wrong checksum in 3 downloads"):
        data.read(at, at + 1000)
    client.put_object(Bucket=BUCKET, Key="sets/damaged/shard-00002.tokens", Body=bytes(content[: PIECE_BYTES + 7]))
    with pytest.raises(DataError, match=r"shard-00002\.tokens ends after 262,151 of "):
        data.read(at + PIECE_BYTES // 2, at + PIECE_BYTES // 2 + 1000)
    last = int(data.starts[3])
    with pytest.raises(DataError, match=r"shard-00002\.tokens ends after"):
        data.read(last - 10, last)
    client.delete_object(Bucket=BUCKET, Key="sets/damaged/shard-00007.docs")
    with pytest.raises(DataError, match=r"sets/damaged/shard-00007\.docs is missing"):
        data.read(data.tokens - 10, data.tokens)


def test_missing_places_and_wrong_keys_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch()
    with pytest.raises(SetupError, match=r"there is no bucket for s3://nowhere/x; check its name and AWS_ENDPOINT_URL"):
        TokenShards.open("s3://nowhere/x", tmp_path)
    with pytest.raises(DataError, match=r"there is no data set at s3://corpora/empty: it has no index\.json"):
        TokenShards.open(f"s3://{BUCKET}/empty", tmp_path)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(SetupError, match=r"refuses access to s3://corpora/x \(the store says SignatureDoesNotMatch\)"):
        TokenShards.open(f"s3://{BUCKET}/x", tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(
        TransientError, match=r"s3://corpora/x cannot be reached.*check AWS_ENDPOINT_URL"
    ) as unreachable:
        TokenShards.open(f"s3://{BUCKET}/x", tmp_path)
    assert "\n" not in str(unreachable.value)
    assert "wrong" not in str(unreachable.value)
    assert watch.quiet_s() < 20

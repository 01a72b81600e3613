"""Input and output elsewhere, tried against an S3 server on this machine and, for the hub, a file system in memory."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("s3fs", reason="needs s3fs: pip install 'lopa_dist[s3]'")
pytest.importorskip("moto.server", reason="needs moto: pip install 'moto[server]'")
pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'lopa_dist[eval]'")

import boto3
import fsspec
import s3fs
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer
from pyarrow import parquet

from lopa_dist.checks import UserError
from lopa_dist.commands import perform
from lopa_dist.config import TaskConfig, check_files
from lopa_dist.jobs.commands.shards import merge_shards
from lopa_dist.jobs.run.job import run
from lopa_dist.parallel.launcher import World
from lopa_dist.tasks.rows import rows
from tests.jobs.run.test_job import config, lines

PROMPTS = [{"id": f"q{n}", "prompt": f"Sam has {n} books .", "max_tokens": 8, "level": n} for n in range(3, 7)]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket that has `prompts.jsonl`, and the environment that leads to it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "any")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        text = "".join(json.dumps(line) + "\n" for line in PROMPTS).encode()
        client.put_object(Bucket="bucket", Key="prompts.jsonl", Body=text)
        client.put_object(Bucket="bucket", Key="prompts.jsonl.gz", Body=gzip.compress(text))
        yield "s3://bucket"
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def job(folder: Path, **task: Any) -> dict[str, Any]:
    made = config(TaskConfig("batch", limit=None, **task))
    check_files(made)
    return run(made, folder, World("python"))


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl"])
def test_from_and_to_s3(bucket: str, tmp_path: Path, ending: str) -> None:
    out = f"{bucket}/out/answers{ending}"
    job(tmp_path / "run", input=f"{bucket}/prompts.jsonl.gz", output=out)
    wanted = lines(tmp_path / "run")
    with fsspec.open(out, "rb") as file:
        content = file.read()
    if ending == ".jsonl":
        assert content == (tmp_path / "run" / "results.jsonl").read_bytes()
        return
    if ending == ".parquet":
        found = parquet.read_table(io.BytesIO(content)).to_pylist()
    else:
        found = list(csv.DictReader(io.StringIO(content.decode())))
    assert [row["text"] for row in found] == [line["text"] for line in wanted]
    assert [row["prompt"] for row in found] == [line["prompt"] for line in PROMPTS]
    assert [int(row["level"]) for row in found] == [3, 4, 5, 6]
    assert [int(row["forwards"]) for row in found] == [line["usage"]["forwards"] for line in wanted]


def test_an_array_is_written_when_it_is_merged(bucket: str, tmp_path: Path) -> None:
    out = f"{bucket}/array.parquet"
    for shard in range(2):
        job(tmp_path / str(shard), input=f"{bucket}/prompts.jsonl", output=out, shard=shard, shards=2)
    assert not fsspec.filesystem("s3").exists(out)
    merge_shards(tmp_path)
    with fsspec.open(out, "rb") as file:
        assert [row["id"] for row in parquet.read_table(file).to_pylist()] == [line["id"] for line in PROMPTS]


def test_what_does_not_answer_is_told_before_and_can_be_written_later(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"task\.input=s3://bucket/none\.jsonl: no such file"):
        list(rows(f"{bucket}/none.jsonl"))
    with pytest.raises(ValueError, match=r"task\.output=s4://x/a\.csv: .*s4"):
        check_files(config(TaskConfig(output="s4://x/a.csv")))
    with pytest.raises(
        ValueError, match=r"task\.output=/dev/null/x/a\.csv: its folder cannot be written to .*Not a directory"
    ):
        check_files(config(TaskConfig(output="/dev/null/x/a.csv")))
    with pytest.raises(ValueError, match="name a file that ends with"):
        TaskConfig(output="s3://bucket/a.txt")
    with monkeypatch.context() as patch:  # a bucket that is gone at the end
        patch.setattr("lopa_dist.config.check_output", lambda path: None)
        with pytest.raises(UserError, match=r"cannot be written.*; the same command again writes them there"):
            job(tmp_path, input=f"{bucket}/prompts.jsonl", output="s3://none/a.csv")
    assert len(lines(tmp_path)) == 4
    perform("table", [str(tmp_path), "--out", f"{bucket}/later.parquet"])
    assert fsspec.filesystem("s3").exists(f"{bucket}/later.parquet")


class Hub(MemoryFileSystem):
    """The hub's files, in memory."""

    protocol, store, pseudo_dirs, cachable = "hf", {}, [""], False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).removeprefix("hf://").strip("/")


def test_a_data_set_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "hf", Hub)
    out = "hf://datasets/me/sums/answers.jsonl"
    run(config(TaskConfig(limit=4, output=out)), tmp_path / "a", World("python"))
    written = fsspec.filesystem("hf").cat_file("/datasets/me/sums/answers.jsonl")
    assert written == (tmp_path / "a" / "results.jsonl").read_bytes()


@pytest.mark.parametrize("output", ["in.jsonl", "./in.jsonl", "link.jsonl", "file://{folder}/in.jsonl"])
def test_the_prompts_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "3"}\n')
    Path("link.jsonl").symlink_to("in.jsonl")
    task = TaskConfig("batch", input="in.jsonl", output=output.format(folder=tmp_path))
    with pytest.raises(UserError, match=r"is task\.input: the results would replace the prompts"):
        run(config(task), tmp_path / "run", World("python"))
    assert Path("in.jsonl").read_text() == '{"prompt": "3"}\n'

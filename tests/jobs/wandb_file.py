"""Reads an offline W&B run file back: a LevelDB log behind a 7-byte header, protobuf records inside."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK = 32768
WHOLE_S = 60.0  # that a finished run may take until its file is written


def records(path: Path) -> list[Any]:
    """Return the protobuf records of a finished run's .wandb file.

    W&B's service writes it after `finish` has returned: it is whole when its last record, the exit, is there.
    """
    end = time.monotonic() + WHOLE_S
    while not (found := written(path)) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < end, f"{path}: no end after {WHOLE_S:g} s"
        time.sleep(0.01)
    return found


def written(path: Path) -> list[Any]:
    """Return the records that are in the file by now."""
    data = path.read_bytes()
    found, whole, at = [], b"", 7
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):  # it is being written
            break
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            found.append(record)
            whole = b""
    return found


def read(folder: Path) -> dict[str, Any]:
    """Return the config, history rows, summary and artifacts of the one offline run below `folder`."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    config, history, summary, artifacts = {}, [], {}, []
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
        elif kind == "history":
            history.append({".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
        elif kind == "summary":
            summary |= {".".join(u.nested_key) or u.key: json.loads(u.value_json) for u in record.summary.update}
        elif kind == "request" and record.request.HasField("log_artifact"):
            artifacts.append(record.request.log_artifact.artifact.type)
        elif kind == "artifact":
            artifacts.append(record.artifact.type)
    return {"config": config, "history": history, "summary": summary, "artifacts": artifacts}

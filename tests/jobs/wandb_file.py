"""Reads an offline W&B run file back: a LevelDB log behind a 7-byte header, protobuf records inside."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK = 32768


def records(path: Path) -> list[Any]:
    """The protobuf records of a .wandb file."""
    data = path.read_bytes()
    found, whole, at = [], b"", 7
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            found.append(record)
            whole = b""
    return found


def read(folder: Path) -> dict[str, Any]:
    """Config, history rows and summary of the one offline run below `folder`."""
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

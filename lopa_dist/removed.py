"""Settings that are gone, and what to write instead. What they did, and what it was worth: docs/tried.md."""

from __future__ import annotations

TRIED = "docs/tried.md says what it was worth"
REMOVED = {
    "decode.lookahead": f"leave it out; {TRIED}",
    "decode.verify=plain_subset": f"take decode.verify=agreement; {TRIED}",
    "decode.verify=plain_exact": f"take decode.verify=agreement; {TRIED}",
    "decode.fill=factor": f"leave it out, tokens above decode.tau_conf are filled; {TRIED}",
    "decode.fill=frechet": f"leave it out, tokens above decode.tau_conf are filled; {TRIED}",
    "decode.fill_level": f"leave it out; {TRIED}",
    "decode.score": f"leave it out, branches are scored by the mean; {TRIED}",
    "decode.score_fraction": f"leave it out; {TRIED}",
    "decode.score_window": f"leave it out; {TRIED}",
    "decode.alpha": f"leave it out; {TRIED}",
    "decode.force": f"leave it out; for leftmost, write decode.sub_block_size=1 decode.max_active_blocks=1; {TRIED}",
    "decode.groups": f"leave it out; decode.drafts=auto chooses groups where they pay; {TRIED}",
    "decode.one_block_from": f"set decode.max_active_blocks=1 where many sequences run; {TRIED}",
    "decode.branches=auto": f"give a number, 0 with drafts in rows; {TRIED}",
    "engine.max_rows=auto": f"give a number, or leave it out; {TRIED}",
    "engine.prefix_cache=approximate": f"take engine.prefix_cache=exact; {TRIED}",
    "decode.tau_verify": f"leave it out, or raise decode.tau_look; {TRIED}",
    "decode.window_attention": "write decode.context=d2f for full windows, d2f_causal or blocks for block_causal ones",
    "decode.prompt_attention": "write decode.context=d2f for self, vanilla or dual for joint, blocks for blocks",
    "decode.boundary": "leave it out: it follows decode.context",
    "decode.cache": "write decode.context=d2f or blocks for block, vanilla for none",
    "decode.cache=dual": "write decode.context=dual",
    "decode.cache=none": "write decode.context=vanilla",
    "decode.cache=token": f"write decode.context=d2f; {TRIED}",
    "decode.cache=prefix": f"write decode.context=dual; {TRIED}",
    "decode.canvas": "leave it out: it is whole with decode.context=vanilla and dual",
    "engine=default": "leave it out: it said what settings are without it",
    "parallel=auto": "leave it out: it said what settings are without it",
    "logging.plots": "leave it out: report.html draws what the plots showed",
    "logging=default": "leave it out: it said what settings are without it",
    "lm-eval": "run the task as a job: task=harness task.harness=NAME (docs/inputs.md)",
    **{f"experiment=s{n}": "docs/inputs.md has the settings to write instead" for n in range(1, 19)},
}
"""By a key, or a key with one of its values: what to write instead."""


def instead(key: str, value: object = None) -> str | None:
    """Return what to write instead of a setting; None if it never was one, or still is."""
    return REMOVED.get(f"{key}={value}") or REMOVED.get(key)

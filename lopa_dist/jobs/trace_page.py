"""A trace as a page of its own: the answer, coloured by the step that filled each token, and a slider through time."""

from __future__ import annotations

import json
from pathlib import Path

from lopa_dist.jobs.trace import BONUS, LOOKAHEAD, Trace

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>How __TITLE__ was filled</title>
<style>
body { font: 16px/1.7 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #0f172a }
#prompt { color: #64748b; white-space: pre-wrap; margin-bottom: 1.5rem }
#answer { white-space: pre-wrap; font-family: ui-monospace, monospace; background: #f8fafc; padding: 1rem;
          border-radius: .5rem }
#answer span { border-radius: .2rem; padding: .1rem 0 }
#answer .open { color: #cbd5e1 } #answer .now { outline: 2px solid #0f172a }
#answer .lookahead { text-decoration: underline 2px } #answer .bonus { text-decoration: underline dotted 2px }
input { width: 100% } #told { min-height: 1.7em } small { color: #64748b }
button { font: inherit; padding: .2rem .8rem }
</style></head><body>
<h1>How <code>__TITLE__</code> was filled</h1>
<div id="prompt"></div>
<p><button id="play">play</button> <span id="told"></span></p>
<input type="range" id="step" min="0" max="__LAST__" value="__LAST__" aria-label="step">
<div id="answer"></div>
<p><small>Colour is the step that filled a token, from blue (first) to red (last). Underlined: a lookahead
token that the winner brought; with verified drafts the forward that followed predicted it again. Underlined with dots:
what the model predicted instead of a draft. A dot is a mask, &para; an end of text. Outlined: filled in the step
shown.</small></p>
<script>
const data = __DATA__;
document.getElementById("prompt").textContent = data.prompt;
const answer = document.getElementById("answer"), slider = document.getElementById("step");
const spans = data.tokens.map(token => {
  const span = document.createElement("span");
  span.title = token.step ? "step " + token.step : "never filled";
  answer.append(span);
  return span;
});
function show(now) {
  data.tokens.forEach((token, i) => {
    const filled = token.step && token.step <= now, appended = i < (now ? data.steps[now - 1].end : data.steps[0].end);
    spans[i].textContent = filled ? token.text : appended ? "\\u00b7" : "";
    spans[i].className = (filled ? "" : "open ") + (token.step === now ? "now " : "") +
      (filled ? token.kind : "");
    const hue = 225 - 225 * (token.step - 1) / Math.max(1, data.steps.length - 1);
    spans[i].style.background = filled ? "hsl(" + hue + " 90% 88%)" : "none";
  });
  const step = data.steps[now - 1];
  document.getElementById("told").textContent = !step ? "all masked" : "step " + now + " of " + data.steps.length +
    ": " + (step.branches === 1 ? "the anchor alone" : step.branches + " branches, " +
    (step.winner ? "lookahead " + step.winner : "the anchor") + " won") +
    (step.drafts ? ", " + step.accepted + " of " + step.drafts + " drafts accepted" : "") +
    ", " + step.filled + " filled" + (step.rejected ? "; rejected: " + step.rejected : "");
}
slider.oninput = () => show(+slider.value);
let timer = null;
document.getElementById("play").onclick = event => {
  if (timer) { clearInterval(timer); timer = null; event.target.textContent = "play"; return; }
  event.target.textContent = "stop";
  slider.value = 0; show(0);
  timer = setInterval(() => {
    if (+slider.value >= data.steps.length) { clearInterval(timer); timer = null; event.target.textContent = "play"; }
    else { slider.value = +slider.value + 1; show(+slider.value); }
  }, 500);
};
show(+slider.value);
</script></body></html>
"""


def write_page(found: Trace, file: Path) -> None:
    """Write the page; it needs nothing but a browser."""
    order = found.order
    kinds = {position: kind for step in found.steps for position, kind in step.filled.items()}
    data = {
        "prompt": found.prompt,
        "tokens": [
            {"text": text, "step": order.get(i, 0), "kind": kinds[i] if kinds.get(i) in (LOOKAHEAD, BONUS) else ""}
            for i, text in enumerate(found.texts)
        ],
        "steps": [
            {
                "branches": s.branches,
                "winner": s.winner,
                "end": s.end,
                "filled": len(s.filled),
                "drafts": s.drafts,
                "accepted": s.accepted,
                "rejected": s.rejected[1] if s.rejected else "",
            }
            for s in found.steps
        ],
    }
    title = found.custom_id.replace("&", "&amp;").replace("<", "&lt;")
    text = PAGE.replace("__TITLE__", title).replace("__LAST__", str(len(found.steps)))
    # "</" would end the script
    file.write_text(text.replace("__DATA__", json.dumps(data).replace("</", "<\\/")), encoding="utf-8")

// One job, live: its events move the plots, and whatever they change on the page is fetched again.

import { refresh } from "./live.js";

const status = document.getElementById("status");
const FINAL = ["succeeded", "failed", "cancelled"];
const PLOTS = {
  eval_loss: (step) => step.eval_loss,
  "eval_ndcg@10": (step) => step["eval_ndcg@10"],
  loss: (step) => step.loss,
  learning_rate: (step) => step.learning_rate,
  pairs_per_s: (step) => step.pairs_per_s,
  memory_bytes: (step) => (step.memory_bytes ?? NaN) / 2 ** 30,
};
const steps = new Map(); // by step: an attempt that goes on from a saved state does some of them again
let lastSeq = 0;
let source = null;
let refreshTimer = null;
let drawTimer = null;

function soon() {
  refreshTimer ??= setTimeout(() => {
    refreshTimer = null;
    refresh().catch(soon);
  }, 1000);
}

// The step that the training keeps: the earliest of equals.
function bestOf(rows, metric) {
  const isBetter = (one, other) => (metric === "eval_loss" ? one < other : one > other);
  return rows
    .filter((row) => metric && Number.isFinite(row[metric]))
    .reduce((best, row) => (!best || isBetter(row[metric], best[metric]) ? row : best), null);
}

function draw() {
  drawTimer = null;
  const frame = document.querySelector(".plots");
  if (!frame || !window.Plotly || steps.size === 0) return;
  frame.hidden = false;
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const rows = [...steps.values()].sort((one, other) => one.step - other.step);
  const axis = { gridcolor: colour("--line"), zeroline: false, automargin: true };
  const best = bestOf(rows, frame.dataset.bestOf);
  for (const [name, value] of Object.entries(PLOTS)) {
    const place = document.getElementById(`plot-${name}`);
    if (!place) continue;
    const isValidation = name.startsWith("eval_");
    const shown = isValidation ? rows.filter((row) => Number.isFinite(value(row))) : rows;
    const trace = {
      x: shown.map((row) => row.step),
      y: shown.map((row) => value(row) ?? null),
      connectgaps: true,
      mode: isValidation ? "lines+markers" : shown.length > 1 ? "lines" : "markers",
      line: { color: colour("--link") },
      marker: { color: colour("--link"), size: isValidation ? 4 : 6 },
    };
    const traces = [trace];
    if (isValidation && best) {
      const marker = { color: colour("--good"), size: 13, symbol: "star" };
      traces.push({ x: [best.step], y: [value(best)], mode: "markers", marker });
      document.querySelector(`[id="of-${name}"] span`).textContent = `; best at step ${best.step}`;
    }
    // From 0 on where a constant is common: around a small one plotly.js would show all from -1 to 1.
    const height = name.endsWith("loss") ? axis : { ...axis, rangemode: "tozero" };
    const layout = {
      margin: { l: 50, r: 10, t: 10, b: 30 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--text") },
      xaxis: axis,
      yaxis: height,
      showlegend: false,
    };
    Plotly.react(place, traces, layout, { displayModeBar: false, responsive: true });
  }
}

function take(message) {
  const event = JSON.parse(message.data);
  lastSeq = event.seq;
  if (event.type === "metrics" && typeof event.data.step === "number") {
    // A step that is validated has a second event, with numbers of its own.
    steps.set(event.data.step, { ...steps.get(event.data.step), ...event.data });
    drawTimer ??= setTimeout(draw, 200);
  }
  if (event.seq > Number(status.dataset.seq)) soon();
}

function connect() {
  source = new EventSource(`/ui/jobs/${status.dataset.job}/events?after=${lastSeq}`);
  for (const type of ["state", "phase", "progress", "metrics", "log"]) source.addEventListener(type, take);
  source.addEventListener("error", () => {
    // The stream ends with the job; one that broke off before is opened again by the browser.
    if (FINAL.includes(status.dataset.state)) source.close();
  });
}

// A browser has six connections for a host: a tab that nobody looks at must not keep one.
document.addEventListener("visibilitychange", () => {
  source.close();
  if (!document.hidden) connect();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
connect();

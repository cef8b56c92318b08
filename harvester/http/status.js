// Asks for /status once a second and shows it. Text only ever goes in as text: nothing here makes HTML of a value.
"use strict";

const EVERY_MS = 1000;
let lastAt = ""; // of the last answer
let lastName = "";
const byId = (id) => document.getElementById(id);
const number = (value, digits = 0) =>
  value == null ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });

const COLUMNS = [
  ["#", (s) => s.index],
  ["state", (s) => s.state],
  ["pid", (s) => s.pid ?? "–"],
  ["rate/s", (s) => number(s.rate_per_s)],
  ["queued", (s) => number(s.queued)],
  ["in flight", (s) => number(s.in_flight)],
  ["parked", (s) => number(s.parked)],
  ["retries", (s) => number(s.retries)],
  ["errors", (s) => number(s.errors)],
  ["cpu", (s) => (s.cpu_percent == null ? "–" : number(s.cpu_percent) + " %")],
  ["restarts", (s) => number(s.restarts)],
];

const FIGURES = [
  ["rate", (s) => number(s.rate_per_s) + " records/s"],
  ["delivered", (s) => number(s.delivered)],
  ["in flight", (s) => number(s.in_flight) + " / " + number(s.max_in_flight)],
  ["queued", (s) => number(s.queued)],
  ["backlog", (s) => (s.backlog ? number(s.backlog.records) + (s.backlog.capped ? "+" : "") : "–")],
  ["oldest", (s) => (s.backlog?.oldest_age_s == null ? "–" : number(s.backlog.oldest_age_s, 1) + " s")],
  ["latency p50", (s) => (s.p50_ms == null ? "–" : number(s.p50_ms, 1) + " ms")],
  ["latency p99", (s) => (s.p99_ms == null ? "–" : number(s.p99_ms, 1) + " ms")],
  ["in quarantine", (s) => number(s.backlog?.quarantine)],
  ["term", (s) => s.term ?? "–"],
];

function make(tag, ...inner) {
  const element = document.createElement(tag);
  element.append(...inner);
  return element;
}

function lasting(fromIso, toIso) {
  const s = Math.max(0, Math.round((Date.parse(toIso) - Date.parse(fromIso)) / 1000));
  if (s < 60) return s + " s";
  if (s < 3600) return Math.floor(s / 60) + " min " + (s % 60) + " s";
  return Math.floor(s / 3600) + " h " + Math.floor((s % 3600) / 60) + " min";
}

// What a standby waits for while nobody may lead.
function awaited(status) {
  if (!status.waits_for) return "";
  const until = status.waits_until_at;
  return (until ? "until " + until.slice(11, 19) + " UTC at the latest: " : "") + status.waits_for;
}

function drawChart(rates) {
  const most = Math.max(1, ...rates);
  const bars = rates.map((rate, index) => {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const height = (rate / most) * 78;
    bar.setAttribute("x", 600 - (rates.length - index) * 10);
    bar.setAttribute("y", 80 - height);
    bar.setAttribute("width", 9);
    bar.setAttribute("height", height);
    return bar;
  });
  byId("chart").replaceChildren(...bars);
  byId("chart-text").textContent = "last minute, at most " + number(rates.length ? Math.max(...rates) : 0) + " records/s";
}

function show(status) {
  lastAt = status.at;
  lastName = status.name;
  document.title = status.state + " · " + status.name;
  byId("name").textContent = status.name;
  byId("state").textContent = status.state;
  byId("since").textContent = "for " + lasting(status.state_since_at, status.at);
  byId("where").textContent = "outbox " + status.outbox + (status.leader_id ? ", leader " + status.leader_id : "");
  byId("problem").textContent = status.problem ?? "";
  byId("waits").textContent = status.problem ? "" : awaited(status) || status.backlog?.advice || "";
  drawChart(status.rate_history);
  byId("figures").replaceChildren(
    ...FIGURES.map(([name, value]) => make("div", make("dt", name), make("dd", String(value(status))))),
  );
  byId("shard-names").replaceChildren(make("tr", ...COLUMNS.map(([name]) => make("th", name))));
  byId("shards").replaceChildren(
    ...status.shards.map((shard) => make("tr", ...COLUMNS.map(([, value]) => make("td", String(value(shard)))))),
  );
  byId("events").replaceChildren(
    ...status.events.toReversed().map((event) => make("li", make("time", event.at.slice(11, 19)), event.text)),
  );
  byId("at").textContent = status.at.slice(0, 19).replace("T", " ") + " UTC, up " + lasting(status.started_at, status.at);
  document.body.classList.remove("stale");
}

async function look() {
  if (!document.hidden) {
    try {
      const response = await fetch("status", { cache: "no-store", signal: AbortSignal.timeout(5000) });
      if (!response.ok) throw new Error(response.status + " " + response.statusText);
      show(await response.json());
    } catch (error) {
      document.body.classList.add("stale");
      byId("problem").textContent = "no answer from the harvester: " + error.message;
      byId("state").textContent = "no answer";
      byId("since").textContent = lastAt && "since " + lastAt.slice(11, 19) + " UTC";
      byId("waits").textContent = "";
      byId("at").textContent = "";
      document.title = "no answer" + (lastName && " · " + lastName);
    }
  }
  setTimeout(look, EVERY_MS);
}

// A page that nobody sees asks for nothing, and so does not know the state.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) document.title = lastName || "harvester";
});

look();

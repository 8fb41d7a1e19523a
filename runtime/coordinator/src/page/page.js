// The page: the view of one run or of several. The data is in the page, or the page polls a job that runs.

const $ = id => document.getElementById(id);

function make(name, attributes = {}, text) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function row(cells, attributes = {}) {
  const tr = make("tr", attributes);
  for (const [text, of = {}] of cells) tr.append(make("td", of, text));
  return tr;
}

const eventsOnAPage = () => innerWidth < 640 ? 6 : 12;
const POLL_MILLISECONDS = 1000;
/** From so many points on, curves are smoothed at first. */
const MANY_POINTS = 80;
/** From so many points of all runs on, a reader would wait for all charts: the first ones are drawn before the others. */
const LARGE = 20_000;
const AT_ONCE = 2;

/** The state of the view, and the work that the charts share. */
const view = {
  runs: [], axis: "step", smoothing: 0, isSmoothingChosen: false, log: false, zoom: null, theme: "light", colours: RUN_COLOURS.light,
  caches: new Map(),

  /** The position of each training point of a run on the axis. */
  positions(run) {
    const { column } = AXES[this.axis];
    return column ? run.train[column] : this.cached(run, `x ${this.axis}`, () => run.train.step.map((_, place) => AXES[this.axis].point(run, place)));
  },

  smoothed(run, column) {
    return this.cached(run, `${column} ${this.smoothing}`, () => smooth(run.train[column], this.smoothing));
  },

  cached(run, key, compute) {
    const cache = this.caches.get(run)?.version === run.version ? this.caches.get(run) : { version: run.version, values: new Map() };
    this.caches.set(run, cache);
    if (!cache.values.has(key)) cache.values.set(key, compute());
    return cache.values.get(key);
  },

  /** The part of the axis that is shown. */
  range() {
    if (this.zoom) return { low: this.zoom[0], high: this.zoom[1] };
    let high = 0;
    for (const run of this.runs) {
      high = Math.max(high, this.positions(run).at(-1) ?? 0, ...run.tests.slice(-1).map(test => AXES[this.axis].test(run, test)));
    }
    return { low: 0, high: high || 1 };
  },

  zoomTo(zoom) {
    this.zoom = zoom;
    drawCharts();
  },
};

const charts = METRICS.map(metric => new Chart(metric, view));

// Theme

const darkSystem = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = "system";
/** A link may ask for a theme and an axis: `#theme=dark&x=epoch`. */
const asked = new URLSearchParams(location.hash.slice(1));
try { chosenTheme = localStorage.getItem("rectrain-theme") ?? "system"; } catch { /* A page from a file may have no storage. */ }
if (["light", "dark"].includes(asked.get("theme"))) chosenTheme = asked.get("theme");

function applyTheme() {
  view.theme = chosenTheme === "system" ? (darkSystem.matches ? "dark" : "light") : chosenTheme;
  view.colours = RUN_COLOURS[view.theme];
  document.documentElement.dataset.theme = view.theme;
  $("theme").textContent = { system: "◐", light: "☀", dark: "☾" }[chosenTheme];
  $("theme").setAttribute("aria-label", `theme: ${chosenTheme}`);
}

function nextTheme() {
  chosenTheme = { system: "light", light: "dark", dark: "system" }[chosenTheme];
  try { localStorage.setItem("rectrain-theme", chosenTheme); } catch { /* As above. */ }
  applyTheme();
  draw();
}

// Header, banners and figures

/** The phase as a reader sees it. A job that no longer answers has none. */
let silentSince = null;
const phaseOf = run => silentSince ? "Silent" : run.record.phase ?? "Starting";
const hasEnded = run => ["Complete", "Failed", "Interrupted"].includes(run.record.phase);

function banner(kind, title, ...texts) {
  const box = make("div", { class: `banner ${kind}`, role: kind === "bad" ? "alert" : "status" });
  box.append(make("strong", {}, title));
  for (const text of texts.filter(Boolean)) {
    const line = make("p");
    // Text between backticks is a command or a field.
    text.split("`").forEach((part, place) => line.append(place % 2 ? make("code", {}, part) : part));
    box.append(line);
  }
  return box;
}

function endBanner(run) {
  const { record, summary } = run, message = sentence(record.message);
  if (record.phase === "Complete") return banner("good", "Complete", summary?.test ? `Test: ${quality(summary.test)} on ${count(summary.test.samples)} rows.` : "The job has no test rows.",
    summary ? `${count(summary.samples)} samples in ${duration(summary.seconds)}, ${count(summary.samplesPerSecond)} a second; ${count(summary.rows)} embedding rows in ${bytes(summary.storeBytes)}.` : null,
    summary?.parametersSha256 ? `Digest of the model: \`${summary.parametersSha256}\`` : null);
  if (record.phase === "Failed") return banner("bad", "Failed", message, record.lastCheckpoint ? `The last checkpoint is \`${record.lastCheckpoint}\`.` : null, resumeText(record));
  if (record.phase === "Interrupted") return banner("warn", "Interrupted", message, resumeText(record) ?? "No checkpoint was saved: the job starts from the beginning. Set `spec.checkpoint` to be able to resume.");
  return null;
}

const resumeText = record => record.resume ? `To continue: \`${record.resume}\`` : null;

/** The member that training waits for, or that slows it the most. */
function slowBanner({ noStepSeconds, waitsFor, slowest }) {
  if (isKnown(noStepSeconds)) return banner("warn", `No step for ${duration(noStepSeconds)}`, waitsFor ? `Training waits for ${waitsFor}.` : null);
  if (!slowest) return null;
  const cost = slowest.share < .01 ? "Its work has moved to other members." : `It costs ${percent(slowest.share)} of the time of a step.`;
  return banner("warn", "A member is slow", `${slowest.role} ${slowest.index} has been slow since ${clock(slowest.sinceSeconds)}. ${cost}`);
}

function banners(run) {
  const all = [endBanner(run)];
  if (silentSince && !hasEnded(run)) {
    all.push(banner("warn", `No answer since ${clock(silentSince / 1000)}`, "The process of the job has ended, or the connection to it is lost. The figures are the last that this page received.",
      run.record.history ? `The result is in \`${run.record.history}\`.` : "If the job ran with a history, `rectrain runs ls` lists its result."));
  }
  if (!hasEnded(run)) all.push(slowBanner(run.record));
  const found = overfit(run);
  if (found) {
    const at = run.stepsPerEpoch ? `epoch ${Number((found.best.step / run.stepsPerEpoch).toFixed(1))} (step ${count(found.best.step)})` : `step ${count(found.best.step)}`;
    all.push(banner("warn", "The model overfits", `The test loss was lowest at ${at}: ${fixed(found.best.logLoss, 4)}. ${hasEnded(run) ? "At the end it is" : "It is now"} ${fixed(found.last.logLoss, 4)}. ` +
      `Train for fewer steps, or use the checkpoint nearest to step ${count(found.best.step)}.`));
  }
  return all.filter(Boolean);
}

/** The epoch of the present step. */
function epochOf(run) {
  const { epoch, step, plan } = run.record;
  const now = isKnown(epoch) ? epoch : run.stepsPerEpoch ? step / run.stepsPerEpoch : null;
  if (now === null) return null;
  return `${significant(now, 3)}${plan?.epochs ? ` of ${count(plan.epochs)}` : ""}`;
}

/** The seconds since the start, and those to the end at the pace so far. */
function times(run) {
  const { now, step, totalSteps } = run.record, end = hasEnded(run) ? run.events.at(-1)?.at ?? now : now;
  const elapsed = isKnown(run.startedAt) && isKnown(end) ? Math.max(end - run.startedAt, 0) : null;
  if (hasEnded(run) || !totalSteps) return { elapsed, left: null };
  // The first step since the start is not 0 where the job resumed.
  const first = run.train.step[0] ?? 0, since = run.train.at[0] ?? run.startedAt;
  return { elapsed, left: step > first && end > since ? (end - since) / (step - first) * (totalSteps - step) : null };
}

function progress(run) {
  const { step, totalSteps, samples } = run.record, { elapsed, left } = times(run), epoch = epochOf(run);
  $("progress").hidden = !isKnown(step);
  const share = totalSteps ? Math.min(step / totalSteps, 1) : 0;
  $("filled").style.width = percent(share).replace(" ", "");
  $("filled").parentElement.hidden = !totalSteps;
  $("progress-text").textContent = [totalSteps ? `step ${count(step)} of ${count(totalSteps)} (${percent(share)})` : `step ${count(step)}`,
    epoch && `epoch ${epoch}`, `${count(samples)} samples`, isKnown(elapsed) && `${duration(elapsed)} elapsed`, isKnown(left) && `about ${duration(left)} left`].filter(Boolean).join(" · ");
}

function result(name, value, note) {
  const box = make("div", { class: "result" });
  box.append(make("span", { class: "soft" }, name), make("b", {}, value), make("span", { class: "soft" }, note ?? ""));
  return box;
}

function results(run) {
  const last = run.tests.at(-1), at = test => `step ${count(test.step)}`;
  const test = (metric, name) => {
    const best = run.tests[bestTest(run.tests, metric)];
    if (!best) return result(name, "–", "no evaluation yet");
    return result(name, fixed(last[metric.test], 4), best === last ? `${at(last)}: the best` : `best ${fixed(best[metric.test], 4)} at ${at(best)}`);
  };
  const loss = run.train.loss.at(-1) ?? run.record.loss;
  const mean = run.summary?.samplesPerSecond;
  return [test(AUC, "test AUC"), test(LOSS, "test log loss"), result("training loss", fixed(loss, 4), "running mean"),
    hasEnded(run) && mean ? result("samples per second", count(mean), "mean of the run") : result("samples per second", count(run.record.samplesPerSecond ?? run.train.samplesPerSecond.at(-1)), "last seconds")];
}

// A figure, and its limit if there is one.
function within(shown, figure, limit) {
  return limit ? `${shown(figure)} of ${shown(limit)}` : shown(figure);
}

function facts(run) {
  const { record, summary } = run, { plan = {}, state = {} } = record;
  const stale = summary?.tokensIssued ? `mean ${fixed(summary.meanStaleness, 2)}, most ${count(summary.maxStaleness)} steps`
    : isKnown(state.meanStaleness) ? `mean ${fixed(state.meanStaleness, 2)} steps` : null;
  const gap = summary?.averageSyncGap ?? record.averageSyncGap;
  const norm = record.gradientNorm === null ? "not finite: a gradient is infinite or no number" : significant(record.gradientNorm, 4);
  const rate = optimizer => isKnown(optimizer?.learningRate) ? `${significant(optimizer.learningRate, 4)} (${optimizer.kind})` : null;
  return [
    ["model", plan.model], ["global batch", plan.globalBatchRows && `${count(plan.globalBatchRows)} rows`],
    ["learning rate, dense", rate(plan.denseOptimizer)],
    ["learning rate, rows", rate(plan.rowOptimizer)],
    ["learning rate, first-order weights", rate(plan.firstOrderOptimizer)],
    ["embedding rows", within(count, state.rows ?? summary?.rows, state.budgetRows)],
    ["embedding memory", within(bytes, state.bytes ?? summary?.storeBytes, state.budgetBytes)],
    ["rows evicted", count(summary?.table?.evicted ?? state.evictedRows)],
    ["gradient norm", norm], ["staleness", stale], ["all-reduce", record.allReduceSeconds ? duration(record.allReduceSeconds) : null],
    ["average sync gap", isKnown(gap) ? `${fixed(gap, 2)} batches` : null],
    ["last checkpoint", record.lastCheckpoint], ["started", isKnown(run.startedAt) ? day(run.startedAt) : null],
    ["version", record.version], ["run", record.title], ["command", record.command],
  ].filter(([, value]) => value && value !== "–");
}

function drawFacts(all) {
  $("facts").replaceChildren(...all.map(([name, value]) => {
    const box = make("div", name === "command" ? { class: "whole" } : {});
    box.append(make("dt", {}, name), make("dd", {}, value));
    return box;
  }));
}

// Several runs

function compared() {
  const rows = [["phase", run => run.record.phase], ["model", run => run.record.plan?.model], ["mode", run => run.summary?.mode ?? run.record.mode],
    ["test AUC, best", run => best(run, AUC), 1], ["test AUC, last", run => last(run, AUC), 1], ["test log loss, best", run => best(run, LOSS), -1],
    ["test log loss, last", run => last(run, LOSS), -1], ["steps", run => run.summary?.steps ?? run.record.step], ["samples", run => run.summary?.samples ?? run.record.samples],
    ["seconds", run => run.summary?.seconds], ["samples per second", run => run.summary?.samplesPerSecond, 1], ["embedding rows", run => run.summary?.rows],
    ["learning rate, dense", run => run.record.plan?.denseOptimizer?.learningRate], ["global batch", run => run.record.plan?.globalBatchRows], ["digest", run => run.summary?.parametersSha256?.slice(0, 12)]];
  const table = make("table", { id: "runs" }), head = make("tr");
  head.append(make("th"), ...view.runs.map((run, place) => {
    const cell = make("th");
    cell.append(swatch(view.colours[place % view.colours.length]), ` ${run.name}`);
    return cell;
  }));
  table.append(head);
  for (const [name, value, better] of rows) {
    const values = view.runs.map(value), numbers = values.filter(isKnown);
    if (values.every(found => found === undefined || found === null)) continue;
    const top = better && new Set(numbers).size > 1 ? better * Math.max(...numbers.map(number => better * number)) : null;
    table.append(row([[name, { class: "tight" }], ...values.map(found => [inTable(name, found), { class: found === top ? "number best" : "number" }])]));
  }
  return table;
}
const best = (run, metric) => run.tests[bestTest(run.tests, metric)]?.[metric.test];
const last = (run, metric) => run.tests.at(-1)?.[metric.test];
const inTable = (name, value) => !isKnown(value) ? value ?? "–" : name.startsWith("test") ? fixed(value, 5) : name.startsWith("learning") ? significant(value, 4) : name === "seconds" ? duration(value) : count(value);

// Charts

function drawCharts() {
  $("reset").disabled = !view.zoom;
  $("smoothing-value").textContent = view.smoothing ? view.smoothing.toFixed(2) : "off";
  for (const button of $("axes").children) {
    button.setAttribute("aria-checked", String(button.dataset.axis === view.axis));
    button.disabled = !isAxis(button.dataset.axis);
  }
  // A run with a point of such a column has its last value in the record.
  const isDrawn = ({ metric }) => !metric.absent || view.runs.some(run => metric.train ? run.record[metric.train] !== undefined : run.tests.some(test => isKnown(test[metric.test])));
  const drawn = charts.filter(isDrawn), absent = charts.filter(chart => !isDrawn(chart));
  const elements = drawn.map(chart => chart.element);
  if ($("charts").children.length !== elements.length) $("charts").replaceChildren(...elements);
  drawInTurn(drawn);
  const names = view.runs.some(run => run.tests.length) ? absent.map(chart => chart.metric.absent) : [];
  $("not-drawn").hidden = !names.length;
  $("not-drawn").textContent = `Not drawn: ${names.join(", ")}.`;
}

/** The charts that are drawn after the present task. */
let waiting = [];

/** Draws all charts, or the first ones at once and each other one in a task of its own, where runs have many points. */
function drawInTurn(drawn) {
  const isLarge = view.runs.reduce((points, run) => points + run.train.step.length, 0) > LARGE;
  const first = isLarge ? AT_ONCE : drawn.length, isUnderWay = waiting.length > 0;
  waiting = drawn.slice(first);
  for (const chart of drawn.slice(0, first)) chart.draw();
  if (waiting.length && !isUnderWay) setTimeout(drawWaiting);
}

function drawWaiting() {
  waiting.shift()?.draw();
  if (waiting.length) setTimeout(drawWaiting);
}

const isAxis = axis => view.runs.every(run => AXES[axis].exists?.(run) ?? true);

function drawModes(run) {
  const names = [...new Set(run.modes.map(mode => mode.mode))];
  $("modes").hidden = view.runs.length > 1 || names.length < 2;
  $("modes").replaceChildren("training modes:", ...names.map(name => {
    const entry = make("span"), mark = make("i", { class: "swatch box" });
    mark.style.background = colourOfMode(name);
    entry.append(mark, ` ${name}`);
    return entry;
  }));
}

function chooseSmoothing() {
  if (view.isSmoothingChosen) return;
  const most = Math.max(...view.runs.map(run => run.train.step.length));
  view.smoothing = most >= MANY_POINTS ? 0.6 : 0;
  $("smoothing").value = view.smoothing;
}

// Events, members and manifests

let eventPage = 0;

function chosenEvents() {
  const [, isOfKind] = KINDS[$("event-kind").value || "all"], text = $("event-text").value.toLowerCase();
  const all = view.runs.flatMap(run => run.events.map(logged => ({ run, ...logged })));
  if (view.runs.length > 1) all.sort((a, b) => a.at - b.at);
  return all.filter(({ event }) => SENTENCES[event.event] && isOfKind(event.event))
    .map(logged => ({ ...logged, words: SENTENCES[logged.event.event](logged.event) }))
    .filter(({ words }) => words.toLowerCase().includes(text)).reverse();
}

function drawEvents() {
  const all = chosenEvents(), size = eventsOnAPage(), pages = Math.max(Math.ceil(all.length / size), 1);
  eventPage = Math.min(Math.max(eventPage, 0), pages - 1);
  $("newer").disabled = eventPage === 0;
  $("older").disabled = eventPage === pages - 1;
  $("event-page").textContent = all.length ? `${count(eventPage * size + 1)}–${count(Math.min((eventPage + 1) * size, all.length))} of ${count(all.length)}` : "none";
  if (!all.length) {
    $("events").tBodies[0].replaceChildren(row([[""], [""], ["No event yet, or none that fits.", { class: "words" }]]));
    return;
  }
  const shown = all.slice(eventPage * size, (eventPage + 1) * size);
  $("events").tBodies[0].replaceChildren(...shown.map(({ run, at, event, words }) => {
    const kind = FATAL.includes(event.event) ? "fatal" : event.event === "summary" ? "end" : KINDS.problems[1](event.event) ? "problem" : "";
    const named = view.runs.length > 1 ? `${run.name}: ${words}` : words;
    return row([[clock(at), { class: "tight", title: day(at) }], [isKnown(event.step ?? event.steps) ? count(event.step ?? event.steps) : "", { class: "tight" }], [named, { class: "words" }]], { class: kind });
  }));
}

function turnEvents(pages) {
  eventPage += pages;
  drawEvents();
}

/** The counters of the last answers, for rates. */
const counters = [];

function rateOf(role) {
  const [before] = counters, now = counters.at(-1);
  if (!now || before === now || !isKnown(before.totals[role]) || !isKnown(now.totals[role])) return null;
  const rate = (now.totals[role] - before.totals[role]) / (now.at - before.at);
  return isKnown(rate) ? rate : null;
}

function noteCounters(record) {
  if (!record.state?.totals) return;
  counters.push({ at: record.now, totals: record.state.totals });
  if (counters.length > 6) counters.shift();
}

function throughput(run, name) {
  const unit = { loader: "rows read", "embedding-worker": "distinct ids", ps: "rows looked up", "dense-worker": "samples" }[name];
  const rate = rateOf(name), total = run.record.state?.totals?.[name];
  if (hasEnded(run) || silentSince || rate === null) return isKnown(total) ? `${compact(total)} ${unit} in all` : "";
  return `${compact(rate)} ${unit} a second`;
}

function drawMembers(run) {
  const { members: all = [], wanted = {}, state = {} } = run.record;
  $("members-section").hidden = view.runs.length > 1 || !all.length;
  if (!all.length) return;
  $("roles").tBodies[0].replaceChildren(...Object.entries(ROLES).map(([section, [name, plural]]) => {
    const there = all.filter(member => member.role === name).length, asked = wanted[section];
    const speeds = all.filter(member => member.role === name && member.computeSeconds).map(member => duration(member.computeSeconds));
    const words = name === "ps" && isKnown(state.rows) ? `${count(state.rows)} rows in ${bytes(state.bytes)}` : speeds.length ? `computes a batch in ${[...new Set(speeds)].slice(0, 4).join(", ")}` : "";
    return row([[plural], [isKnown(asked) && asked !== there ? `${there}, ${asked} requested` : String(there)], [throughput(run, name)], [words]]);
  }));
  $("members").tBodies[0].replaceChildren(...all.map(member => row([[`${member.role} ${member.index}`, { class: "tight" }], [isKnown(member.slots) ? count(member.slots) : ""],
    [isKnown(member.rows) ? count(member.rows) : ""], [isKnown(member.bytes) ? bytes(member.bytes) : ""], [member.computeSeconds ? duration(member.computeSeconds) : ""], [member.address, { class: "words" }]])));
}

let shownManifests = "";

function drawManifests() {
  const all = view.runs.filter(run => run.record.manifest), key = all.map(run => run.record.manifest).join("\n---\n");
  $("manifest-section").hidden = !all.length;
  if (key === shownManifests) return;
  shownManifests = key;
  $("manifests").replaceChildren(...all.map(run => {
    const details = make("details");
    details.append(make("summary", {}, run.name), make("pre", { tabindex: 0 }, run.record.manifest));
    return details;
  }));
}

/** Draws everything. */
function draw() {
  const [run] = view.runs, several = view.runs.length > 1;
  chooseSmoothing();
  const title = several ? view.runs.map(run => run.name).join(" and ") : run.name;
  const phase = phaseOf(run) === "Silent" ? "no answer" : phaseOf(run);
  document.title = several ? `${title}: compared` : `${title}: ${phase}`;
  $("name").textContent = several ? `${view.runs.length} runs compared` : title;
  $("phase").textContent = several ? "history" : phase;
  $("phase").className = `badge ${several ? "" : phaseOf(run)}`;
  $("mode").textContent = run.record.mode ?? "";
  $("mode").hidden = several || !run.record.mode;
  $("banners").replaceChildren(...(several ? [] : banners(run)));
  $("table-of-runs").hidden = !several;
  $("results").hidden = several;
  if (several) {
    $("table-of-runs").replaceChildren(compared());
  } else {
    progress(run);
    $("results").replaceChildren(...results(run));
    drawFacts(facts(run));
  }
  drawModes(run);
  drawCharts();
  drawEvents();
  drawMembers(run);
  drawManifests();
}

/** The curves as text: one line for each training point and each test. */
function csv() {
  const head = ["run", "kind", "time", "step", "samples", "loss", "auc", "gauc", "normalizedEntropy", "calibration", "samplesPerSecond", "gradientNorm"];
  const lines = [head.join(",")];
  const text = value => value === null || value === undefined ? "" : String(value);
  for (const run of view.runs) {
    run.train.step.forEach((step, place) => lines.push([JSON.stringify(run.name), "training", run.train.at[place], step, run.train.samples[place], run.train.loss[place], run.train.auc[place],
      "", "", "", run.train.samplesPerSecond[place], run.train.gradientNorm[place]].map(text).join(",")));
    for (const test of run.tests) {
      lines.push([JSON.stringify(run.name), "test", test.at, test.step, samplesAt(run, test.step), test.logLoss, test.auc, test.gauc, test.normalizedEntropy, test.calibration, "", ""].map(text).join(","));
    }
  }
  return `${lines.join("\n")}\n`;
}

function download() {
  const link = make("a", { download: `${view.runs.map(run => run.name).join("-")}.csv`, href: URL.createObjectURL(new Blob([csv()], { type: "text/csv" })) });
  link.click();
  URL.revokeObjectURL(link.href);
}

// Controls

function setAxis(axis) {
  if (!isAxis(axis)) return;
  view.axis = axis;
  view.zoom = null;
  drawCharts();
}

function setSmoothing(value) {
  view.smoothing = Math.min(Math.max(Number(value), 0), 0.99);
  view.isSmoothingChosen = true;
  $("smoothing").value = view.smoothing;
  drawCharts();
}

function setLog(log) {
  view.log = log;
  $("log").checked = log;
  drawCharts();
}

function zoomBy(factor) {
  const { low, high } = view.range(), middle = (low + high) / 2, half = (high - low) / 2 * factor;
  view.zoomTo([Math.max(middle - half, 0), middle + half]);
}

const KEYS = {
  x: () => { const names = Object.keys(AXES).filter(isAxis); setAxis(names[(names.indexOf(view.axis) + 1) % names.length]); },
  l: () => setLog(!view.log), s: () => setSmoothing(view.smoothing + 0.1), S: () => setSmoothing(view.smoothing - 0.1),
  "0": () => view.zoomTo(null), "+": () => zoomBy(0.5), "-": () => zoomBy(2), n: () => turnEvents(1), p: () => turnEvents(-1), t: nextTheme, "?": () => $("help").showModal(),
};

function bind() {
  $("axes").replaceChildren(...Object.keys(AXES).map(axis => {
    const button = make("button", { type: "button", role: "radio", "data-axis": axis, "aria-checked": "false" }, axis);
    button.addEventListener("click", () => setAxis(axis));
    return button;
  }));
  $("event-kind").replaceChildren(...Object.entries(KINDS).map(([kind, [words]]) => make("option", { value: kind }, words)));
  const filter = () => { eventPage = 0; drawEvents(); };
  $("event-kind").addEventListener("change", filter);
  $("event-text").addEventListener("input", filter);
  $("newer").addEventListener("click", () => turnEvents(-1));
  $("older").addEventListener("click", () => turnEvents(1));
  $("smoothing").addEventListener("input", event => setSmoothing(event.target.value));
  $("log").addEventListener("change", event => setLog(event.target.checked));
  $("reset").addEventListener("click", () => view.zoomTo(null));
  $("csv").addEventListener("click", download);
  $("theme").addEventListener("click", nextTheme);
  $("help-button").addEventListener("click", () => $("help").showModal());
  addEventListener("keydown", event => {
    const isTyping = event.target.closest?.("input[type=search], select") || event.ctrlKey || event.metaKey || event.altKey || $("help").open;
    if (!isTyping && KEYS[event.key]) KEYS[event.key]();
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) drawCharts();
    width = innerWidth;
  });
  darkSystem.addEventListener("change", () => { applyTheme(); draw(); });
}

// Data

async function poll(run, seen) {
  try {
    const answer = await fetch(`job.json?after=${seen.event}&points=${seen.point}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    const record = await answer.json();
    silentSince = null;
    seen.event = record.events?.at(-1)?.number ?? seen.event;
    seen.point = record.curve?.last ?? seen.point;
    seen.at = Date.now();
    run.name = record.name ?? run.name;
    noteCounters(record);
    ingest(run, record);
    $("contact").textContent = "";
  } catch (error) {
    // The page must not look alive when the job is not.
    silentSince ??= seen.at ?? Date.now();
    $("contact").textContent = seen.at ? "" : `waiting for the job: ${error.message}`;
    if (!seen.at) silentSince = null;
  }
  draw();
  setTimeout(() => poll(run, seen), POLL_MILLISECONDS);
}

function start() {
  bind();
  applyTheme();
  if (asked.get("x") in AXES) view.axis = asked.get("x");
  const embedded = JSON.parse($("data").textContent);
  if (embedded) {
    // Several runs may be of one job, so each has the name of its folder.
    const name = record => embedded.runs.length > 1 ? record.title ?? record.name : record.name;
    view.runs = embedded.runs.map(record => ingest(emptyRun(name(record)), record));
    draw();
  } else {
    view.runs = [emptyRun("rectrain")];
    poll(view.runs[0], { event: 0, point: 0, at: null });
  }
}
start();

// The charts, drawn by uPlot: one for each metric, all with the same x axis, zoom and cursor.

const MODE_COLOURS = { sync: "#3b6fb6", hybrid: "#7d4fc4", gba: "#a86400", async: "#bd3232", bsp: "#0f7f86", hopBs: "#2f7d32", hopBw: "#86513f", shadow: "#56606b", des: "#8a3d6b" };
const RUN_COLOURS = { light: ["#2563eb", "#c2410c", "#15803d", "#9333ea", "#be123c", "#0e7490", "#854d0e", "#4b5563"],
  dark: ["#6cb0ff", "#ff9e5e", "#56d364", "#c297ff", "#ff7b9c", "#39c5cf", "#e3b341", "#a8b1bb"] };

const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOfMode = mode => MODE_COLOURS[mode] ?? "#5b6570";
const withAlpha = (colour, alpha) => `${colour}${Math.round(255 * alpha).toString(16).padStart(2, "0")}`;

/** The modes of a run as bands on an axis. */
function bands(run, axis) {
  return run.modes.map((from, place) => ({
    mode: from.mode,
    from: place ? positionOfStep(run, axis, from.step) : -Infinity,
    to: place + 1 < run.modes.length ? positionOfStep(run, axis, run.modes[place + 1].step) : Infinity,
  })).filter(band => band.to > band.from);
}

/** All curves of a metric: each with its points, colour and words. */
function curvesOf(metric, view) {
  const several = view.runs.length > 1;
  return view.runs.flatMap((run, place) => {
    const colour = several ? view.colours[place % view.colours.length] : null;
    const xs = view.positions(run), named = several ? `${run.name}, ` : "";
    const curves = [];
    if (metric.train && run.train.step.length) curves.push(...trainCurves(metric, view, run, xs, { named, colour, several }));
    const tests = metric.test ? run.tests.filter(test => isKnown(test[metric.test])) : [];
    if (tests.length) {
      const points = [tests.map(test => AXES[view.axis].test(run, test)), tests.map(test => test[metric.test])];
      curves.push({ run, name: `${named}test`, points, colour: colour ?? style("--test"), width: 2, marks: tests.length <= 60, best: bestTest(tests, metric), about: metric.about?.test });
    }
    return curves;
  });
}

function trainCurves(metric, view, run, xs, { named, colour, several }) {
  const values = run.train[metric.train], name = metric.test ? `${named}training` : several ? run.name : "all dense workers";
  const line = colour ?? style("--train"), dash = several && metric.test ? [5, 4] : undefined;
  const curve = { run, name, xs, about: metric.about?.train, dash, colour: line, width: several ? 1.3 : 1.7 };
  if (!view.smoothing) return [{ ...curve, values }];
  const smoothed = view.smoothed(run, metric.train);
  const raw = { ...curve, values, colour: withAlpha(line, several ? 0.18 : 0.3), width: 1, isRaw: true, dash: undefined };
  return [raw, { ...curve, values: smoothed }];
}

/** One chart. It keeps its uPlot until the curves or the theme change. */
class Chart {
  constructor(metric, view) {
    this.metric = metric;
    this.view = view;
    this.hidden = new Set();
    this.element = make("div", { class: "chart", tabindex: 0, role: "img", "data-metric": metric.key });
    this.title = make("div", { class: "title" });
    this.title.append(metric.title, " ", make("span", { class: "soft" }, metric.unit));
    this.legend = make("div", { class: "legend" });
    this.plot = make("div", { class: "plot" });
    this.tip = make("div", { class: "tip", hidden: "" });
    this.element.append(this.title, this.legend, this.plot);
    this.element.addEventListener("keydown", event => this.key(event));
  }

  get height() {
    const isLarge = ["loss", "auc"].includes(this.metric.key);
    return innerWidth < 640 ? 210 : isLarge ? 300 : 220;
  }

  /** Draws the present curves. */
  draw() {
    this.curves = curvesOf(this.metric, this.view);
    const shown = this.curves.filter(curve => !this.hidden.has(curve.name));
    this.shown = shown;
    const hasPoints = this.curves.some(curve => (curve.xs ?? curve.points[0]).length > 0);
    if (!hasPoints) return this.drawNothing();
    const width = Math.max(this.element.clientWidth - 20, 120), { low, high } = this.view.range();
    for (const curve of shown) if (curve.xs) curve.points = thin(curve.xs, curve.values, low, high, Math.max(width, 200));
    const data = shown.length ? uPlot.join(shown.map(curve => curve.points)) : [[low, high]];
    const key = JSON.stringify([shown.map(curve => [curve.name, curve.colour, curve.width, curve.marks, curve.dash]), this.isLog, this.view.axis, this.view.theme, width, this.height]);
    if (key !== this.key_) this.rebuild(shown, data, width);
    else this.uplot.setData(data, false);
    this.key_ = key;
    this.uplot.batch(() => {
      this.uplot.setScale("x", { min: low, max: high });
      this.uplot.setScale("y", this.yRange(low, high));
    });
    this.drawLegend();
    this.element.setAttribute("aria-label", this.words());
  }

  get isLog() {
    return this.view.log && Boolean(this.metric.log);
  }

  drawNothing() {
    this.uplot?.destroy();
    this.uplot = null;
    this.key_ = null;
    this.legend.replaceChildren();
    const box = make("div", { class: "nothing" }, this.metric.train ? "No report of progress yet." : "No evaluation yet.");
    box.style.height = `${Math.min(this.height, 160)}px`;
    this.plot.replaceChildren(box);
    this.element.setAttribute("aria-label", `${this.metric.title}: no data`);
  }

  rebuild(shown, data, width) {
    this.uplot?.destroy();
    const soft = style("--soft"), grid = { stroke: style("--grid"), width: 1 };
    const axis = { stroke: soft, grid, ticks: { ...grid, size: 4 }, font: "12px system-ui, sans-serif" };
    const words = AXES[this.view.axis].words;
    const options = {
      width, height: this.height, legend: { show: false }, padding: [20, 20, 0, 0],
      cursor: { sync: { key: "rectrain", setSeries: false, scales: ["x", null] }, drag: { x: true, y: false, setScale: false }, focus: { prox: -1 },
        points: { size: 6 }, bind: { dblclick: () => () => { this.view.zoomTo(null); return null; } } },
      scales: { x: { time: false, auto: false }, y: { auto: false, distr: this.isLog ? 3 : 1 } },
      axes: [
        { ...axis, label: AXES[this.view.axis].label, labelSize: 18, labelFont: "12px system-ui, sans-serif", size: 26, space: 70, values: (_, ticks) => ticks.map(tick => tick === null ? "" : words(tick)) },
        { ...axis, size: 58, space: 34, values: (_, ticks) => ticks.map(tick => this.tick(tick)) },
      ],
      series: [{}, ...shown.map(curve => ({ stroke: curve.colour, width: curve.width, dash: curve.dash, spanGaps: true,
        points: { show: Boolean(curve.marks) || curve.points[0].length === 1, size: 6, fill: curve.colour } }))],
      hooks: { drawClear: [uplot => this.paintBack(uplot)], draw: [uplot => this.paintMarks(uplot)],
        setSelect: [uplot => this.select(uplot)], setCursor: [uplot => this.follow(uplot)] },
    };
    this.plot.replaceChildren();
    this.uplot = new uPlot(options, data, this.plot);
    this.uplot.over.append(this.tip);
    this.uplot.over.addEventListener("mouseleave", () => { this.tip.hidden = true; });
  }

  tick(tick) {
    // On a log scale uPlot also puts a tick at the end of the scale, which is no round number.
    if (tick === null || (this.isLog && Number(tick.toPrecision(1)) !== Number(tick.toPrecision(6)))) return "";
    return this.metric.tick?.(tick) ?? significant(tick, 4);
  }

  /** The range of the values between `low` and `high`, with a margin. */
  yRange(low, high) {
    let least = Infinity, most = -Infinity;
    for (const { points: [xs, ys] } of this.shown) {
      for (let place = 0; place < xs.length; place += 1) {
        const value = ys[place];
        if (value === null || xs[place] < low || xs[place] > high || (this.isLog && value <= 0)) continue;
        least = Math.min(least, value);
        most = Math.max(most, value);
      }
    }
    if (least > most) [least, most] = this.isLog ? [0.1, 1] : [0, 1];
    if (this.isLog) return { min: least / 1.1, max: Math.max(most * 1.1, least * 1.2) };
    const margin = 0.07 * (most - least) || Math.abs(most) * 0.05 || 0.5;
    return { min: this.metric.fromZero ? 0 : least - margin, max: most + margin };
  }

  /** Behind the curves: the bands of modes, and the part where the run overfits. */
  paintBack(uplot) {
    const { ctx, bbox } = uplot, ratio = devicePixelRatio;
    const [run] = this.view.runs;
    const x = value => Math.min(Math.max(uplot.valToPos(value, "x", true), bbox.left), bbox.left + bbox.width);
    const edge = value => value === -Infinity ? bbox.left : value === Infinity ? bbox.left + bbox.width : x(value);
    ctx.save();
    if (this.view.runs.length === 1) {
      const all = bands(run, this.view.axis);
      for (const band of all) {
        const [from, to] = [edge(band.from), edge(band.to)], colour = colourOfMode(band.mode);
        if (to - from < 0.5) continue;
        if (all.length > 1) {
          ctx.fillStyle = withAlpha(colour, this.view.theme === "dark" ? 0.2 : 0.1);
          ctx.fillRect(from, bbox.top, to - from, bbox.height);
        }
        ctx.fillStyle = colour;
        ctx.fillRect(from, bbox.top - 15 * ratio, to - from - (all.length > 1 ? ratio : 0), 13 * ratio);
        this.name(ctx, band.mode, from, to, bbox.top - 8.5 * ratio, "#fff");
      }
      this.paintOverfit(uplot, run, x);
    }
    this.paintLine(uplot);
    ctx.restore();
  }

  name(ctx, text, from, to, y, colour) {
    const ratio = devicePixelRatio;
    ctx.font = `600 ${10.5 * ratio}px system-ui, sans-serif`;
    if (ctx.measureText(text).width + 6 * ratio > to - from) return;
    ctx.fillStyle = colour;
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    ctx.fillText(text, from + 4 * ratio, y);
  }

  overfitOf(run) {
    return ["loss", "auc", "ne", "gauc"].includes(this.metric.key) ? overfit(run) : null;
  }

  paintOverfit(uplot, run, x) {
    const found = this.overfitOf(run);
    if (!found) return;
    const { ctx, bbox } = uplot, from = x(AXES[this.view.axis].test(run, found.best)), to = bbox.left + bbox.width;
    ctx.fillStyle = style("--overfit");
    ctx.fillRect(from, bbox.top, to - from, bbox.height);
  }

  nameOverfit(uplot) {
    const [run] = this.view.runs, found = this.overfitOf(run);
    if (!found || this.view.runs.length > 1) return;
    const { ctx, bbox } = uplot, ratio = devicePixelRatio, to = bbox.left + bbox.width;
    const from = Math.max(uplot.valToPos(AXES[this.view.axis].test(run, found.best), "x", true), bbox.left);
    // A rising curve leaves room at the top, a falling one at the bottom.
    const y = this.metric.best === "least" ? bbox.top + 10 * ratio : bbox.top + bbox.height - 9 * ratio;
    ctx.save();
    this.name(ctx, "overfits: the test loss rises", from, to, y, style("--bad"));
    ctx.restore();
  }

  /** The value that a calibrated or trivial model has. */
  paintLine(uplot) {
    const { ctx, bbox } = uplot, { line } = this.metric, { min, max } = uplot.scales.y;
    if (line === undefined || !(line >= min && line <= max)) return;
    const y = uplot.valToPos(line, "y", true), ratio = devicePixelRatio;
    ctx.strokeStyle = style("--soft");
    ctx.lineWidth = ratio;
    ctx.setLineDash([2 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.setLineDash([]);
  }

  /** Over the curves: a ring and the value at the best test. */
  paintMarks(uplot) {
    const { ctx, bbox } = uplot, ratio = devicePixelRatio;
    this.nameOverfit(uplot);
    for (const curve of this.shown) {
      if (!(curve.best >= 0)) continue;
      const [at, value] = [curve.points[0][curve.best], curve.points[1][curve.best]];
      const [x, y] = [uplot.valToPos(at, "x", true), uplot.valToPos(value, "y", true)];
      if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1 || !Number.isFinite(y)) continue;
      ctx.save();
      ctx.strokeStyle = curve.colour;
      ctx.lineWidth = 2 * ratio;
      ctx.beginPath();
      ctx.arc(x, y, 6.5 * ratio, 0, 2 * Math.PI);
      ctx.stroke();
      if (this.view.runs.length === 1) this.paintBest(uplot, curve, value, x, y);
      ctx.restore();
    }
  }

  paintBest(uplot, curve, value, x, y) {
    const { ctx, bbox } = uplot, ratio = devicePixelRatio, text = `best ${fixed(value, this.metric.digits)}`;
    ctx.font = `600 ${11.5 * ratio}px system-ui, sans-serif`;
    const width = ctx.measureText(text).width, isRight = x + width + 14 * ratio > bbox.left + bbox.width;
    const isBelow = y - 22 * ratio < bbox.top;
    ctx.textAlign = isRight ? "right" : "left";
    ctx.textBaseline = "middle";
    const [textX, textY] = [x + (isRight ? -10 : 10) * ratio, y + (isBelow ? 14 : -13) * ratio];
    ctx.lineJoin = "round";
    ctx.lineWidth = 4 * ratio;
    ctx.strokeStyle = style("--paper");
    ctx.strokeText(text, textX, textY);
    ctx.fillStyle = curve.colour;
    ctx.fillText(text, textX, textY);
  }

  select(uplot) {
    const { left, width } = uplot.select;
    // uPlot tells every chart of the selection. Only the one under the pointer zooms.
    if (width) uplot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (width < 4 || !uplot.over.matches(":hover")) return;
    const [low, high] = [uplot.posToVal(left, "x"), uplot.posToVal(left + width, "x")];
    this.view.zoomTo([low, high]);
  }

  /** Shows the values at the cursor in the legend, and beside the pointer. */
  follow(uplot) {
    const { idx, left, top } = uplot.cursor;
    const at = isKnown(idx) && left >= 0 ? uplot.data[0][idx] : null;
    this.drawLegend(at);
    const isHere = uplot.over.matches(":hover") || this.element.matches(":focus-visible");
    this.tip.hidden = at === null || !isHere;
    if (this.tip.hidden) return;
    const lines = this.shown.filter(curve => !curve.isRaw).map(curve => {
      const line = make("span");
      line.append(swatch(curve.colour), `${curve.name} `, make("b", {}, this.value(nearest(curve.points, at))));
      return line;
    });
    const mode = this.view.runs.length === 1 ? bands(this.view.runs[0], this.view.axis).find(band => at >= band.from && at < band.to)?.mode : null;
    this.tip.replaceChildren(make("span", { class: "soft" }, `${AXES[this.view.axis].label} ${AXES[this.view.axis].words(at)}${mode ? ` · ${mode}` : ""}`), ...lines);
    const isRight = left > uplot.over.clientWidth / 2;
    this.tip.style.left = isRight ? "" : `${left + 14}px`;
    this.tip.style.right = isRight ? `${uplot.over.clientWidth - left + 14}px` : "";
    this.tip.style.top = `${Math.max(Math.min(top - 10, uplot.over.clientHeight - this.tip.offsetHeight), 0)}px`;
  }

  value(value) {
    return this.metric.words?.(value) ?? fixed(value, this.metric.digits);
  }

  drawLegend(at = null) {
    const entries = this.curves.filter(curve => !curve.isRaw).map(curve => {
      const points = curve.points ?? [[], []];
      const value = at === null ? points[1].at(-1) : nearest(points, at);
      const button = make("button", { type: "button", "aria-pressed": String(!this.hidden.has(curve.name)), title: curve.about ?? "" });
      button.append(swatch(curve.colour, curve.dash), `${curve.name} `, make("b", {}, this.value(value)));
      button.addEventListener("click", () => this.toggle(curve.name));
      return button;
    });
    this.legend.replaceChildren(...entries);
  }

  toggle(name) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    this.draw();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.uplot) return;
    event.preventDefault();
    const xs = this.uplot.data[0], before = this.uplot.cursor.idx ?? xs.length - 1 - step;
    const place = Math.min(Math.max(before + step * (event.shiftKey ? 10 : 1), 0), xs.length - 1);
    this.uplot.setCursor({ left: this.uplot.valToPos(xs[place], "x"), top: 12 });
  }

  /** The chart in a sentence, for screen readers. */
  words() {
    const parts = this.curves.filter(curve => !curve.isRaw && curve.points?.[1].length).map(curve => {
      const best = curve.best >= 0 ? `, best ${this.value(curve.points[1][curve.best])} at ${AXES[this.view.axis].label} ${AXES[this.view.axis].words(curve.points[0][curve.best])}` : "";
      return `${curve.name} is ${this.value(curve.points[1].at(-1))}${best}`;
    });
    return `${this.metric.title} by ${AXES[this.view.axis].label}: ${parts.join("; ")}`;
  }
}

function swatch(colour, dash) {
  const mark = make("i", { class: "swatch" });
  mark.style.background = dash ? `repeating-linear-gradient(90deg, ${colour} 0 4px, transparent 4px 7px)` : colour;
  return mark;
}

/** The value at the point nearest to `at`. */
function nearest([xs, ys], at) {
  if (!xs.length) return null;
  const place = lowerBound(xs, at);
  if (place === 0) return ys[0];
  if (place === xs.length) return ys.at(-1);
  return at - xs[place - 1] < xs[place] - at ? ys[place - 1] : ys[place];
}

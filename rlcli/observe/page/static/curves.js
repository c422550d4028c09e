"use strict";

// Charts of metrics, drawn by uPlot.

const CHART_HEIGHT = 210;
const CHARTS_AT_FIRST = 6;
const WHOLE_STEPS = [0, 1, 2, 3, 4, 5, 6, 7].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

class Curves {
  constructor(page) {
    this.page = page;
    this.smoothing = 0;
    this.charts = [];
    this.shown = Object.keys(page.usual).slice(0, CHARTS_AT_FIRST);
    this.grid = element("div", { class: "charts" });
    this.key = element("div", { class: "key" });
    document.addEventListener("theme", () => this.draw());
    new ResizeObserver(() => this.resize()).observe(this.grid);
  }

  nodes() {
    return [this.controls(), this.key, this.grid];
  }

  controls() {
    const names = Object.keys(this.page.curves);
    const list = element("datalist", { id: "metrics" }, names.map((name) => element("option", { value: name })));
    const add = (event) => {
      const name = event.target.value;
      if (!names.includes(name)) return;
      this.shown = [name, ...this.shown.filter((each) => each !== name)];
      event.target.value = "";
      this.draw();
    };
    const smooth = (event) => { this.smoothing = Number(event.target.value); this.draw(); };
    return element("div", { class: "controls" },
      element("input", { type: "search", list: "metrics", placeholder: `one of ${names.length} metrics`, "aria-label": "metric", oninput: add }), list,
      element("label", {}, "smooth", element("input", { type: "range", min: 0, max: 20, value: 0, oninput: smooth })));
  }

  draw() {
    for (const chart of this.charts) chart.destroy();
    const labels = this.page.groups.map((group) => group.label);
    this.key.replaceChildren(...(labels.length < 2 ? [] : labels.map((label, number) => {
      const line = element("i");
      line.style.background = colour(number);
      return element("span", {}, line, label, this.page.groups[number].runs.length > 1 ? ` (${this.page.groups[number].runs.length} runs)` : "");
    })));
    this.grid.replaceChildren();
    this.charts = this.shown.map((name) => this.chart(name));
  }

  chart(name) {
    const close = () => { this.shown = this.shown.filter((each) => each !== name); this.draw(); };
    const box = element("div", { class: "chart" }, element("header", { title: this.page.meanings[name] },
      element("h3", {}, this.page.usual[name] ?? name),
      this.page.usual[name] ? element("code", { class: "faint" }, name) : null,
      element("button", { type: "button", "aria-label": `close ${name}`, onclick: close }, "×")));
    this.grid.append(box);
    const { series, bands, data } = lines(this.page, name, this.smoothing);
    const axis = { stroke: style("--faint"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const options = {
      width: this.width(box), height: CHART_HEIGHT, series, bands,
      scales: { x: { time: false } },
      axes: [{ ...axis, size: 28, incrs: WHOLE_STEPS }, { ...axis, size: 52, values: (_, ticks) => ticks.map(short) }],
      cursor: { sync: { key: "steps" } },
    };
    return new uPlot(options, data, box);
  }

  width(box) {
    return Math.max(box.clientWidth - 24, 120);
  }

  resize() {
    for (const chart of this.charts) {
      chart.setSize({ width: this.width(chart.root.parentNode), height: CHART_HEIGHT });
    }
  }
}

/** What uPlot draws of a metric: for each group its mean, and its spread as a band. */
function lines({ curves, groups }, name, smoothing) {
  const series = [{ label: "step" }];
  const bands = [];
  const tables = [];
  curves[name].forEach((columns, number) => {
    if (columns == null) return;
    const [steps, values, spread] = columns;
    const table = [steps];
    if (spread != null) {
      table.push(values.map((value, at) => value + spread[at]), values.map((value, at) => value - spread[at]));
      bands.push({ series: [series.length, series.length + 1], fill: `${colour(number)}33` });
      series.push(hidden(), hidden());
    } else if (smoothing) {
      table.push(values);
      series.push({ ...hidden(), stroke: `${colour(number)}55`, width: 1 });
    }
    table.push(smoothed(values, smoothing));
    series.push({
      label: groups.length > 1 ? groups[number].label : "value", stroke: colour(number), width: 1.8,
      points: { show: values.length < 30 }, value: (_, value) => short(value), spanGaps: true,
    });
    tables.push(table);
  });
  return { series, bands, data: uPlot.join(tables) };
}

function hidden() {
  return { label: "", stroke: "transparent", points: { show: false }, value: () => "", class: "hidden", spanGaps: true };
}

/** A centred moving mean, whose window becomes smaller towards both ends. */
function smoothed(values, strength) {
  const reach = Math.round((values.length * strength) / 200);
  return values.map((value, at) => {
    const near = Math.min(reach, at, values.length - 1 - at);
    const window = values.slice(at - near, at + near + 1);
    return window.reduce((sum, each) => sum + each, 0) / window.length;
  });
}

"use strict";

// Everything that a model may have written reaches the page as text nodes only.

const COLOURS = {
  light: ["#1f5fa8", "#c8553d", "#2f7d4f", "#8a5aa8", "#a06a00", "#3f8f94", "#b0487a", "#555f6b"],
  dark: ["#79b0f0", "#f0907c", "#74cf9a", "#c79be0", "#e0b050", "#7ccfd4", "#ee93bd", "#a9b4c0"],
};
const CHART_HEIGHT = 210;
const CHARTS_AT_FIRST = 6;
const SURPRISING = 4; // nats from which a token has the strongest colour
const WHOLE_STEPS = [0, 1, 2, 3, 4, 5, 6, 7].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const RESPONSES_PER_PAGE = 20;

/** An element with attributes and children; strings become text. */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

/** About three digits: 0.612, 34.2, 842, 25.3k. */
function short(number) {
  if (number == null || !Number.isFinite(number)) return "–";
  const size = Math.abs(number);
  if (size >= 1e9) return number.toExponential(2);
  if (size >= 999_500) return `${(number / 1e6).toFixed(1)}M`;
  if (size >= 9_999.5) return `${(number / 1e3).toFixed(1)}k`;
  if (size && size < 1e-3) return number.toExponential(1);
  return String(Number(number.toPrecision(size >= 100 ? Math.ceil(Math.log10(size + 1)) : 3)));
}

function clock(seconds) {
  const total = Math.round(seconds);
  const [hours, minutes] = [Math.floor(total / 3600), Math.floor(total / 60) % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(total % 60)}` : `${minutes}:${two(total % 60)}`;
}

function bytes(count) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.floor(Math.log2(Math.max(count, 1)) / 10), units.length - 1);
  return `${short(count / 1024 ** power)} ${units[power]}`;
}

function table(headings, rows, classes = []) {
  const cells = (tag, texts) =>
    texts.map((text, column) => element(tag, { class: classes[column] }, text));
  return element("div", { class: "scrolled" }, element("table", {},
    element("thead", {}, element("tr", {}, cells("th", headings))),
    element("tbody", {}, rows.map((row) => element("tr", {}, cells("td", row))))));
}

function select(label, options, onchange) {
  const list = element("select", { onchange: (event) => onchange(event.target.value) },
    options.map(([value, text]) => element("option", { value }, text)));
  return element("label", {}, label, list);
}

async function readDocument() {
  const packed = document.getElementById("document").textContent;
  const compressed = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

// -- theme ------------------------------------------------------------------------------------

const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");

function theme() {
  return document.documentElement.dataset.theme;
}

function useTheme(name) {
  document.documentElement.dataset.theme = name;
  document.dispatchEvent(new Event("theme"));
}

function followTheme() {
  useTheme(prefersDark.matches ? "dark" : "light");
  prefersDark.addEventListener("change", () => useTheme(prefersDark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click",
    () => useTheme(theme() === "dark" ? "light" : "dark"));
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function colour(number) {
  return COLOURS[theme()][number % COLOURS.light.length];
}

// -- summary ----------------------------------------------------------------------------------

function summary({ groups }) {
  const figures = groups.length === 1 ? groups[0].results.filter(isTelling).slice(0, 4).map(figure) : [];
  return [
    element("div", { class: "figures" }, figures),
    table(["run", "state", "step", "time", "began", ""],
      groups.flatMap((group) => group.runs.map((run) => runRow(group, run))),
      ["name", "name", "number", "number", "name", ""]),
    groups.length > 1 ? comparison(groups) : null,
  ];
}

const TELLING = ["held-out accuracy", "held-out reward", "held-out loss"];

/** Whether a result is about more than a detail of an evaluation. */
function isTelling({ label }) {
  return TELLING.includes(label) || !label.startsWith("held-out ");
}

function figure({ label, before, after }) {
  return element("div", { class: "figure" }, element("small", {}, label),
    element("b", {}, short(after)), element("small", {}, before == null ? "" : `from ${short(before)}`));
}

function runRow(group, run) {
  const state = element("span", { class: run.state === "done" ? "good" : run.state === "failed" || run.state === "died" ? "bad" : "warm" }, run.state);
  const resumed = run.resumed_after.length ? `resumed after step ${run.resumed_after.join(", ")}. ` : "";
  const step = run.steps == null ? String(run.step) : `${run.step}/${run.steps}`;
  return [run.name, state, step, clock(run.seconds), (run.started ?? "").slice(0, 16).replace("T", " "),
    `${resumed}${run.message ?? ""}`];
}

/** The last results of each group. */
function comparison(groups) {
  const labels = [...new Set(groups.flatMap((group) => group.results.map((row) => row.label)))];
  const last = (group, label) => group.results.find((row) => row.label === label)?.after;
  return table(["", ...groups.map((group) => group.label)],
    labels.map((label) => [label, ...groups.map((group) => short(last(group, label)))]),
    ["name", ...groups.map(() => "number")]);
}

// -- curves -----------------------------------------------------------------------------------

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

// -- responses --------------------------------------------------------------------------------

const ORDERS = {
  step: (a, b) => b.step - a.step,
  best: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  worst: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  longest: (a, b) => (b.length ?? 0) - (a.length ?? 0),
  advantage: (a, b) => Math.abs(b.advantage ?? 0) - Math.abs(a.advantage ?? 0),
};

class Responses {
  constructor(page) {
    this.page = page;
    this.chosen = { phase: "", step: "", group: "", order: "step", query: "", view: "each", colouring: "" };
    this.first = 0;
    this.list = element("div");
    this.count = element("span", { class: "faint" });
  }

  nodes() {
    this.draw();
    return [this.controls(), this.list, this.pager()];
  }

  controls() {
    const set = (name) => (value) => { this.chosen[name] = value; this.first = 0; this.draw(); };
    const distinct = (field) => [...new Set(this.page.samples.map((sample) => sample[field]))];
    const steps = distinct("step").sort((a, b) => a - b);
    const groups = this.page.groups.map((group, number) => [number, group.label]);
    return element("div", { class: "controls" },
      element("input", { type: "search", placeholder: "search prompts and responses", "aria-label": "search", oninput: (event) => set("query")(event.target.value) }),
      groups.length > 1 ? select("runs", [["", "all"], ...groups], set("group")) : null,
      select("phase", [["", "all"], ...distinct("phase").map((phase) => [phase, phase])], set("phase")),
      select("step", [["", "all"], ...steps.map((step) => [step, step])], set("step")),
      select("order", [["step", "latest step"], ["best", "highest reward"], ["worst", "lowest reward"],
        ["longest", "longest"], ["advantage", "largest advantage"]], set("order")),
      select("view", [["each", "each response"], ["change", "before and after"]], set("view")),
      this.colouring(set("colouring")));
  }

  /** A choice among what was recorded of tokens. */
  colouring(choose) {
    const names = { logprob: "log-prob", advantage: "advantage", version: "version" };
    const fields = { logprob: "token_logprobs", advantage: "token_advantages", version: "versions" };
    const recorded = Object.keys(fields).filter((name) => this.page.samples.some((sample) => sample[fields[name]]));
    if (!recorded.length) return null;
    return select("colour tokens by", [["", "nothing"], ...recorded.map((name) => [name, names[name]])], choose);
  }

  pager() {
    const turn = (pages) => () => { this.first += pages * RESPONSES_PER_PAGE; this.draw(); };
    this.back = element("button", { type: "button", onclick: turn(-1) }, "‹ back");
    this.next = element("button", { type: "button", onclick: turn(1) }, "next ›");
    const pager = element("div", { class: "controls" }, this.back, this.count, this.next);
    this.update();
    return pager;
  }

  matching() {
    const { phase, step, group, query, order, colouring } = this.chosen;
    const words = query.toLowerCase();
    const matches = (sample) =>
      (!colouring || sample.tokens) && (!phase || sample.phase === phase) && (step === "" || sample.step === Number(step)) &&
      (group === "" || sample.group === Number(group)) &&
      (!words || `${sample.prompt}\n${sample.response}`.toLowerCase().includes(words));
    return this.page.samples.filter(matches).sort(ORDERS[order]);
  }

  draw() {
    const samples = this.matching();
    this.entries = this.chosen.view === "each" ? samples : changes(samples);
    const shown = this.entries.slice(this.first, this.first + RESPONSES_PER_PAGE);
    this.list.replaceChildren(...shown.map((entry) => (Array.isArray(entry) ? change(entry, this.chosen.colouring) : response(entry, this.chosen.colouring))));
    this.update();
  }

  update() {
    const { length } = this.entries;
    const last = Math.min(this.first + RESPONSES_PER_PAGE, length);
    const left = this.page.samples_left_out;
    this.count.textContent = (length ? `${this.first + 1} to ${last} of ${length}` : "none") +
      (left ? `; ${left} of other steps are in samples.jsonl` : "");
    if (!this.back) return;
    this.back.disabled = this.first === 0;
    this.next.disabled = last >= length;
  }
}

/** The first and the last response to each prompt, where they differ. */
function changes(samples) {
  const ends = new Map();
  for (const sample of samples) {
    const name = JSON.stringify([sample.group, sample.run, sample.phase, sample.id, sample.number]);
    const [first, last] = ends.get(name) ?? [sample, sample];
    ends.set(name, [sample.step < first.step ? sample : first, sample.step > last.step ? sample : last]);
  }
  return [...ends.values()].filter(([first, last]) => first.response !== last.response);
}

function change([before, after], colouring) {
  return element("article", { class: "response" }, facts(after, []),
    element("p", { class: "text prompt" }, before.prompt),
    element("div", { class: "sides" }, [before, after].map((sample) =>
      element("div", {}, facts(sample, ["step", "reward"]), written(sample, colouring)))));
}

function response(sample, colouring) {
  return element("article", { class: "response" }, facts(sample, ["step", "reward", "measures"]),
    element("p", { class: "text prompt" }, sample.prompt), written(sample, colouring),
    sample.reason ? element("p", { class: "faint" }, sample.reason) : null);
}

function facts(sample, kinds) {
  const reward = sample.reward == null ? null : element("b", { class: sample.reward > 0 ? "good" : "bad" }, `reward ${short(sample.reward)}`);
  const parts = {
    reward: [reward],
    step: [`step ${sample.step}`, sample.phase],
    measures: [
      sample.advantage == null ? null : `advantage ${short(sample.advantage)}`,
      sample.length == null ? null : `${sample.length} tokens`,
      sample.logprob == null ? null : `log-prob ${short(sample.logprob)}`,
      sample.finish === "length" ? "cut off at the limit" : null,
    ],
  };
  const row = [`row ${sample.id}`, sample.answer == null ? null : `answer ${sample.answer}`];
  const texts = [...kinds.flatMap((kind) => parts[kind]), ...(kinds.length === 2 ? [] : row)];
  return element("div", { class: "facts" }, texts.filter((text) => text != null).map((text) => element("span", {}, text)));
}

/** A response; of several turns, each with what was observed after it. `colouring`: what its tokens
 *  are coloured by, if they were recorded. */
function written(sample, colouring) {
  if (colouring && sample.tokens) return element("div", { class: "text" }, coloured(sample, colouring));
  const turns = sample.turns ?? [{ sampled: true, text: sample.response }];
  const rewards = [...(sample.turn_rewards ?? [])];
  return element("div", { class: "text" }, turns.map(({ sampled, text }) => {
    if (!sampled) return element("div", { class: "observed" }, text.trim());
    const reward = rewards.shift();
    return element("div", {}, text, reward == null ? null : element("span", { class: "faint" }, `  reward ${short(reward)}`));
  }));
}

/** A span for each token, with its numbers as a tooltip. */
function coloured({ tokens, token_logprobs, token_advantages, versions, turns }, colouring) {
  const sampled = turns?.flatMap((turn) => Array(turn.tokens).fill(turn.sampled)) ?? tokens.map(() => true);
  const of_tokens = versionsOf(versions, sampled);
  const oldest = Math.min(...of_tokens.filter((version) => version != null));
  const largest = Math.max(...(token_advantages ?? []).map((advantage) => Math.abs(advantage ?? 0)), 1e-9);
  return tokens.map((text, at) => {
    if (!sampled[at]) return element("span", { class: "observed", title: "observed" }, text);
    const [logprob, advantage, version] = [token_logprobs?.[at], token_advantages?.[at], of_tokens[at]];
    const facts = { "log-prob": logprob, advantage, version };
    const known = Object.entries(facts).filter(([, value]) => value != null);
    const span = element("span", { class: "token", title: known.map(([name, value]) => `${name} ${short(value)}`).join(", ") }, text);
    span.style.backgroundColor = {
      logprob: () => tint("--accent", Math.min(-(logprob ?? 0) / SURPRISING, 1)),
      advantage: () => tint(advantage < 0 ? "--bad" : "--good", Math.abs(advantage ?? 0) / largest),
      version: () => (version == null ? "" : `${colour(version - oldest)}55`),
    }[colouring]();
    return span;
  });
}

/** The version of each token; observed ones have none. */
function versionsOf(versions, sampled) {
  const of_sampled = (versions ?? []).flatMap(([version, count]) => Array(count).fill(version));
  return sampled.map((is_sampled) => (is_sampled ? of_sampled.shift() : null));
}

/** A colour of the theme, as strong as a share of 1. */
function tint(name, share) {
  const strength = Math.round(share * 0x99).toString(16).padStart(2, "0");
  return `${style(name)}${strength}`;
}

// -- time -------------------------------------------------------------------------------------

function time({ groups, curves }) {
  const rate = (name) => name === "tokens_per_second" || name.startsWith("perf/");
  return groups.flatMap((group, number) => {
    const means = Object.entries(curves)
      .filter(([name, columns]) => (name.startsWith("time/") || rate(name)) && columns[number])
      .map(([name, columns]) => [name, mean(columns[number][1])]);
    const step = means.find(([name]) => name === "time/step")?.[1];
    return [groups.length > 1 ? element("h3", {}, group.label) : null,
      table(["mean of all steps", "", "of a step", ""], means.map((entry) => timeRow(entry, step)),
        ["name", "number", "number", ""]),
      group.planned_memory ? element("p", { class: "faint" }, `Planned peak of memory: ${bytes(group.planned_memory)}.`) : null];
  });
}

function timeRow([name, value], step) {
  const isTime = name.startsWith("time/") && !name.startsWith("time/idle_share/");
  const share = isTime && step && name !== "time/eval" ? value / step : null;
  const bar = element("span", { class: "bar" });
  bar.style.width = `${Math.min((share ?? 0) * 160, 160)}px`;
  return [name, isTime ? `${short(value)} s` : short(value), share == null ? "" : `${Math.round(share * 100)} %`, share ? bar : ""];
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

// -- recipe -----------------------------------------------------------------------------------

class Recipe {
  constructor({ groups, differences }) {
    this.groups = groups;
    this.differences = differences;
    this.chosen = { group: 0, query: "", defaults: false };
    this.list = element("div");
  }

  nodes() {
    this.draw();
    return [this.changed(), this.controls(), this.list];
  }

  changed() {
    if (this.groups.length < 2) return null;
    return table(["what differs", ...this.groups.map((group) => group.label)],
      this.differences.map(({ key, set_to }) => [key, ...set_to.map((value) => value ?? "–")]));
  }

  controls() {
    const set = (name, value) => { this.chosen[name] = value; this.draw(); };
    const groups = this.groups.map((group, number) => [number, group.label]);
    return element("div", { class: "controls" },
      element("input", { type: "search", placeholder: "search keys, values and files", "aria-label": "search the recipe", oninput: (event) => set("query", event.target.value) }),
      groups.length > 1 ? select("runs", groups, (value) => set("group", Number(value))) : null,
      element("label", {}, element("input", { type: "checkbox", onchange: (event) => set("defaults", event.target.checked) }), "defaults too"));
  }

  draw() {
    const { group, query, defaults } = this.chosen;
    const rows = this.groups[group].recipe.filter((row) =>
      (defaults || !row[2].startsWith("default")) && row.join(" ").includes(query));
    this.list.replaceChildren(table(["key", "value", "set in"], rows.map(([key, value, origin]) =>
      [element("code", {}, key), element("code", {}, value), element("span", { class: "faint" }, origin)])));
  }
}

// -- repeating it -----------------------------------------------------------------------------

function repetition({ groups }) {
  return groups.flatMap((group) => [
    groups.length > 1 ? element("h3", {}, group.label) : null,
    element("pre", {}, group.command),
    table(["", ""], Object.entries(group.environment), ["name", ""]),
  ]);
}

// -- the page ---------------------------------------------------------------------------------

async function show() {
  const page = await readDocument();
  followTheme();
  const curves = new Curves(page);
  const sections = {
    Summary: summary(page),
    Curves: curves.nodes(),
    Responses: page.samples.length ? new Responses(page).nodes() : null,
    Time: time(page),
    Recipe: new Recipe(page).nodes(),
    "Repeat it": repetition(page),
  };
  const main = document.querySelector("main");
  main.replaceChildren();
  for (const [title, nodes] of Object.entries(sections)) {
    if (nodes == null) continue;
    const id = title.toLowerCase().replaceAll(" ", "-");
    main.append(element("section", { id }, element("h2", {}, title), ...nodes.filter((node) => node != null)));
    document.querySelector("nav").append(element("a", { href: `#${id}` }, title));
  }
  document.querySelector("footer").append(`written by rlcli ${page.rlcli}, ${page.written.replace("T", " ").slice(0, 16)} UTC`);
  curves.draw();
  document.documentElement.dataset.ready = "";
}

show();

"use strict";

// The timeline of a step: a row for each track of each rank, and above them the critical path.

const ROW = 20; // pixels, as all of these
const SPACE = 3;
const AXIS = 24;
const LETTER = 6.2;
const LABELS = { least: 84, share: 0.16, most: 150 };
const TICKS = 6;
const BESIDES = { move: "--faint", running: "--good", queued: "--warm", paused: "--bad" };
const WITHOUT_COLOUR = ["wait", "between calls", "other"];

/** An element of a drawing. */
function shape(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

class Timeline {
  constructor({ groups }) {
    this.groups = groups.filter((group) => group.timeline);
    this.group = 0;
    this.step = this.groups[0]?.timeline.shown;
    this.box = element("div", { class: "timeline" });
    this.key = element("div", { class: "key" });
    this.advice = element("div");
    this.steps = element("span");
    document.addEventListener("theme", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  /** What the section consists of; null if no run has a timeline. */
  nodes() {
    if (!this.groups.length) return null;
    const groups = this.groups.map((group, number) => [number, group.label]);
    const choose = (number) => {
      this.group = Number(number);
      this.step = this.groups[this.group].timeline.shown;
      this.offerSteps();
      this.draw();
    };
    this.offerSteps();
    return [
      element("div", { class: "controls" }, groups.length > 1 ? select("runs", groups, choose) : null, this.steps),
      this.key, this.box, this.advice,
    ];
  }

  offerSteps() {
    const { steps } = this.groups[this.group].timeline;
    const options = steps.map(({ step, seconds }) => [step, `${step} (${short(seconds)} s)`]);
    const list = select("step", options, (step) => { this.step = Number(step); this.draw(); });
    list.querySelector("select").value = this.step;
    this.steps.replaceChildren(list);
  }

  draw() {
    const width = this.box.clientWidth;
    if (!this.groups.length || !width) return;
    const step = this.groups[this.group].timeline.steps.find((each) => each.step === this.step);
    const rows = [{ label: "critical path", spans: step.path }, ...step.tracks.map((track) => ({ label: label(track), spans: track.spans }))];
    this.colours = coloursOf(rows);
    this.left = Math.min(Math.max(width * LABELS.share, LABELS.least), LABELS.most);
    this.scale = (width - this.left - 8) / step.seconds;
    const height = AXIS + rows.length * (ROW + SPACE);
    const drawing = shape("svg", { width, height, role: "img", "aria-label": `timeline of step ${step.step}` }, ...this.axis(step.seconds, height));
    rows.forEach((row, number) => drawing.append(...this.row(row, AXIS + number * (ROW + SPACE))));
    this.box.replaceChildren(drawing);
    this.key.replaceChildren(...[...this.colours].map(([name, fill]) => {
      const line = element("i");
      line.style.background = fill;
      return element("span", {}, line, name);
    }));
    const left = step.left_out ? `${step.left_out} further spans are in trace.json.` : "";
    this.advice.replaceChildren(...[...step.advice, left].filter((text) => text).map((text) => element("p", { class: "faint" }, text)));
  }

  axis(seconds, height) {
    const distance = niceDistance(seconds / TICKS);
    const ticks = Array.from({ length: Math.floor(seconds / distance) + 1 }, (_, number) => number * distance);
    return ticks.flatMap((tick) => {
      const x = this.left + tick * this.scale;
      const text = shape("text", { x, y: 12, class: "faint", "text-anchor": tick ? "middle" : "start" }, `${short(tick)} s`);
      return [shape("line", { x1: x, x2: x, y1: AXIS - 6, y2: height }), text];
    });
  }

  row({ label: text, spans }, y) {
    const letters = Math.floor(this.left / LETTER);
    const title = shape("title", {}, text);
    const name = shape("text", { x: 0, y: y + ROW - 6, class: "faint" }, text.length > letters ? `${text.slice(0, letters - 1)}…` : text, title);
    return [name, ...spans.flatMap((span) => this.span(span, y))];
  }

  span([name, kind, began, seconds, of], y) {
    const [x, width] = [this.left + began * this.scale, Math.max(seconds * this.scale, 0.5)];
    const fill = this.colours.get(name);
    const facts = `${name}${of ? `, ${of}` : ""}: ${short(seconds)} s`;
    const paint = fill ? { fill } : { class: "wait" };
    const box = shape("rect", { x, y, width, height: ROW, rx: 2, ...paint }, shape("title", {}, facts));
    const letters = Math.floor((width - 6) / LETTER);
    if (letters < 4 || kind === "between calls") return [box];
    const cut = name.length > letters ? `${name.slice(0, letters - 1)}…` : name;
    const text = shape("text", { x: x + 4, y: y + ROW - 6, class: fill ? "" : "faint", "pointer-events": "none" }, cut);
    return [box, text];
  }
}

function label({ rank, name }) {
  return name === "calls" ? `rank ${rank}` : `rank ${rank} ${name}`;
}

/** A colour for the name of each call, and of what happens besides them; waits have none. */
function coloursOf(rows) {
  const spans = rows.flatMap((row) => row.spans).filter(([, kind]) => !WITHOUT_COLOUR.includes(kind));
  const kinds = new Map(spans.map(([name, kind]) => [name, kind]));
  const calls = [...kinds.keys()].filter((name) => !(kinds.get(name) in BESIDES));
  return new Map([...kinds].map(([name, kind]) =>
    [name, `${kind in BESIDES ? style(BESIDES[kind]) : colour(calls.indexOf(name))}99`]));
}

/** 1, 2 or 5 times a power of ten, at least as large as a number. */
function niceDistance(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((distance) => distance >= least);
}

"use strict";

// Elements and numbers. Everything that a model may have written reaches the page as text nodes only.

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

"use strict";

// How the runs ended.

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

function figure({ label, before, after, spread }) {
  return element("div", { class: "figure" }, element("small", {}, label),
    element("b", {}, measured({ after, spread })), element("small", {}, before == null ? "" : `from ${short(before)}`));
}

function runRow(group, run) {
  const state = element("span", { class: run.state === "done" ? "good" : run.state === "failed" || run.state === "died" ? "bad" : "warm" }, run.state);
  const resumed = run.resumed_after.length ? `resumed after step ${run.resumed_after.join(", ")}. ` : "";
  const step = run.steps == null ? String(run.step) : `${run.step}/${run.steps}`;
  return [run.name, state, step, clock(run.seconds), (run.started ?? "").slice(0, 16).replace("T", " "),
    `${resumed}${run.message ?? ""}`];
}

/** A result, with its spread over the runs of a group. */
function measured({ after, spread }) {
  return spread == null ? short(after) : `${short(after)} ± ${short(spread)}`;
}

/** The last results of each group. */
function comparison(groups) {
  const labels = [...new Set(groups.flatMap((group) => group.results.map((row) => row.label)))];
  const last = (group, label) => group.results.find((row) => row.label === label) ?? {};
  return table(["", ...groups.map((group) => group.label)],
    labels.map((label) => [label, ...groups.map((group) => measured(last(group, label)))]),
    ["name", ...groups.map(() => "number")]);
}

"use strict";

// Where the time of a step goes.

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

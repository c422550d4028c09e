"use strict";

// Where the time of a step goes.

const BESIDES_STEPS = ["time/eval", "time/checkpoint"];

function time(page) {
  const { groups } = page;
  return groups.flatMap((group, number) => {
    const means = Object.entries(page.means)
      .map(([name, of_groups]) => [name, of_groups[number]])
      .filter(([, mean]) => mean != null);
    const step = means.find(([name]) => name === "time/step")?.[1];
    return [groups.length > 1 ? element("h3", {}, group.label) : null,
      table(["mean of all steps", "", "of a step", ""], means.map((entry) => timeRow(entry, step)),
        ["name", "number", "number", ""]),
      group.planned_memory ? element("p", { class: "faint" }, `Planned peak of memory: ${bytes(group.planned_memory)}.`) : null];
  });
}

function timeRow([name, value], step) {
  const isTime = name.startsWith("time/") && !name.startsWith("time/idle_share/");
  const share = isTime && step && !BESIDES_STEPS.includes(name) ? value / step : null;
  const bar = element("span", { class: "bar" });
  bar.style.width = `${Math.min((share ?? 0) * 160, 160)}px`;
  return [name, isTime ? `${short(value)} s` : short(value), share == null ? "" : `${Math.round(share * 100)} %`, share ? bar : ""];
}

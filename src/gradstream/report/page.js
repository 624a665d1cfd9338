// Zooms and pans the timeline, and says what is under the pointer. Without it the page is complete.
"use strict";
for (const box of document.querySelectorAll(".timeline")) {
  document.documentElement.classList.add("js");
  const data = JSON.parse(box.querySelector("script").textContent);
  const lanes = box.querySelector(".lanes"), svg = lanes.querySelector("svg"), times = box.querySelector(".times");
  const tools = box.parentElement.querySelector(".tools"), says = tools.querySelector("output");
  const whole = svg.viewBox.baseVal.width, seconds = data.seconds, least = whole / 1e5;
  let left = 0, width = whole;

  const text = (s) => (s < 1e-3 ? (1e6 * s).toFixed(0) + " µs" : s < 1 ? +(1e3 * s).toPrecision(3) + " ms"
    : s < 120 ? +s.toPrecision(3) + " s" : Math.floor(s / 60) + " min " + Math.round(s % 60) + " s");

  function show(newLeft, newWidth) {
    width = Math.min(whole, Math.max(least, newWidth));
    left = Math.min(whole - width, Math.max(0, newLeft));
    svg.setAttribute("viewBox", `${left} 0 ${width} ${svg.viewBox.baseVal.height}`);
    const from = (left / whole) * seconds, span = (width / whole) * seconds;
    const digits = Math.max(0, Math.min(6, 1 - Math.floor(Math.log10(span / 4))));
    times.replaceChildren(...[0, 1, 2, 3, 4].map((i) => {
      const mark = document.createElement("span");
      mark.style.left = 25 * i + "%";
      mark.textContent = (from + (span * i) / 4).toFixed(digits) + " s";
      return mark;
    }));
  }
  function zoom(factor, at = 0.5) {
    const wanted = Math.min(whole, Math.max(least, width * factor));
    show(left + at * (width - wanted), wanted);
  }
  const place = (event) => {
    const box = lanes.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  };

  function tell(event) {
    const [x, y] = place(event);
    const lane = data.lanes[Math.floor(y * data.lanes.length)];
    if (!lane) return;
    const at = ((left + x * width) / whole) * seconds;
    let low = 0, high = lane.steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.steps[middle][1] < at) low = middle + 1; else high = middle;
    }
    const step = lane.steps[low];
    if (!step || step[0] > at) { says.textContent = `${lane.name}, ${text(at)}: between two steps`; return; }
    const [, , number, count, compute, waits] = step;
    const what = count > 1 ? `steps ${number} to ${number + count - 1}` : `step ${number}`;
    const waited = waits.map(([name, s]) => text(s) + " " + (name === lane.name ? "own sums" : "for " + (name || "nobody named")));
    says.textContent = `${lane.name}, ${text(at)}: ${what} · computed ${text(compute)}` + (waited.length ? " · waited " + waited.join(", ") : "");
  }

  lanes.addEventListener("pointermove", (event) => {
    if (event.buttons & 1) show(left - (event.movementX / lanes.clientWidth) * width, width);
    tell(event);
  });
  lanes.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return; // the page scrolls
    event.preventDefault();
    zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, place(event)[0]);
  }, { passive: false });
  lanes.addEventListener("dblclick", (event) => zoom(0.25, place(event)[0]));
  const verbs = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => show(0, whole),
    ArrowLeft: () => show(left - width / 5, width), ArrowRight: () => show(left + width / 5, width),
    Home: () => show(0, width), End: () => show(whole, width),
  };
  lanes.addEventListener("keydown", (event) => {
    if (verbs[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); verbs[event.key](); }
  });
  for (const button of tools.querySelectorAll("button")) button.addEventListener("click", () => verbs[button.value]());
}

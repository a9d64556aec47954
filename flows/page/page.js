"use strict";
(() => {
  const tip = document.getElementById("tip");
  const text = (value) => (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6) || value === 0
    ? String(Number(value.toPrecision(4))) : value.toExponential(2);
  const nearest = (points, x) => points.reduce((best, one) => Math.abs(one[0] - x) < Math.abs(best[0] - x) ? one : best);
  const known = new WeakMap();
  const hover = (event) => {
    const chart = event.target.closest ? event.target.closest("svg.chart") : null;
    document.querySelectorAll(".cross").forEach((line) => { line.style.visibility = "hidden"; });
    if (!chart) { tip.style.display = "none"; return; }
    if (!known.has(chart)) known.set(chart, JSON.parse(chart.dataset.hover));
    const found = known.get(chart), axis = found.x, box = chart.getBoundingClientRect();
    if (!found.s.length) { tip.style.display = "none"; return; }
    const pixel = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    const part = Math.min(1, Math.max(0, (pixel - axis.s) / (axis.e - axis.s)));
    const at = axis.log ? axis.l * Math.pow(axis.h / axis.l, part) : axis.l + part * (axis.h - axis.l);
    const x = nearest(found.s[0].p, at)[0], span = axis.h - axis.l;
    const line = (name, value, colour) => {
      const row = document.createElement("div"), number = document.createElement("b");
      row.append(name + " "); number.textContent = value; if (colour) number.className = "k" + colour;
      row.append(number); return row;
    };
    const rows = [line(found.u, text(Number(x.toPrecision(6))))];
    for (const one of found.s) {
      const point = nearest(one.p, at);
      if (Math.abs(point[0] - x) > span * 0.03) continue;
      rows.push(line(one.n, text(point[1]) + (point[2] ? " ± " + text(point[2]) : ""), one.c));
    }
    tip.replaceChildren(...rows);
    tip.style.display = "block";
    const left = event.clientX + 16, wide = tip.offsetWidth;
    tip.style.left = (left + wide > innerWidth - 8 ? Math.max(4, event.clientX - wide - 12) : left) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
    const cross = chart.querySelector(".cross"), share = axis.log ? Math.log(x / axis.l) / Math.log(axis.h / axis.l) : (x - axis.l) / span;
    const px = axis.s + share * (axis.e - axis.s);
    cross.setAttribute("x1", px); cross.setAttribute("x2", px); cross.style.visibility = "visible";
  };
  document.addEventListener("mousemove", hover);
  const every = Number(document.body.dataset.refresh || 0);
  const refresh = async () => {
    const state = document.getElementById("live");
    try {
      const answer = await fetch(location.pathname, {cache: "no-store"});
      if (!answer.ok) throw new Error(String(answer.status));
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
      const open = new Set([...document.querySelectorAll("details[open]")].map((one) => one.id));
      for (const one of fresh.querySelectorAll("details")) one.open = open.has(one.id);
      document.querySelector("main").replaceWith(document.adoptNode(fresh));
      tip.style.display = "none";
    } catch (error) {
      if (state) state.textContent = "the page is not refreshed any more: `streamrl report --live` has ended";
    }
    setTimeout(refresh, every * 1000);
  };
  if (every) setTimeout(refresh, every * 1000);
})();

  // Moving, zooming, pinning, searching and folding, with pointer, wheel, touch and keys.
  const tip = document.getElementById("tip"), line = document.getElementById("line"), status = document.getElementById("status");
  const search = document.getElementById("search"), fold = document.getElementById("fold");

  function timeAt(canvas, x) {
    return view.from + (x - left()) / (canvas.clientWidth - left() - RIGHT) * (view.to - view.from);
  }

  function show(start, end) {
    const length = Math.min(Math.max(end - start, whole / 1e5), whole);
    view.from = Math.min(Math.max(start, first), last - length);
    view.to = view.from + length;
    redraw();
  }

  function zoom(factor, center = (view.from + view.to) / 2) {
    show(center - (center - view.from) * factor, center + (view.to - center) * factor);
  }

  function move(share) {
    const moved = share * (view.to - view.from);
    show(view.from + moved, view.to + moved);
  }

  function hit(scene, time, y) {
    const device = scene.devices.find(d => y >= d.top - 2 && y < d.bottom + 2);
    const row = device && device.shown.find(r => y >= r.y && y < r.y + r.height + 2);
    return { device, row, i: row ? row.at(time) : -1 };
  }

  function describe(scene, time, y) {
    const { device, row, i } = hit(scene, time, y);
    if (!device) return null;
    if (i >= 0) return operationWords(row, i);
    if (y >= device.aroundTop && y < device.memoryTop) {
      const phase = device.around.find(([start, end]) => start <= time && time < end);
      if (phase) return [phase[2], `device ${device.number}, around the program\n${span(scene, phase[0], phase[1])}`];
    }
    if (time < 0 || time > scene.makespan) return null;
    const idle = row && row.compute && device.bubbles.find(([start, end]) => start <= time && time < end);
    if (idle) {
      const [start, end, cause, awaited] = idle;
      return ["idle: " + data.causes[cause],
        `device ${device.number} waits for ${awaited || "nothing that the program names"}\n${span(scene, start, end)}`];
    }
    return memoryWords(scene, device, time);
  }

  function memoryWords(scene, device, time) {
    let held = device.levels[0];
    for (let i = 0; i < device.times.length && device.times[i] <= time; i++) held = device.levels[i];
    const fixed = device.static.reduce((sum, size) => sum + size, 0);
    const parts = device.static.map((size, i) => `\n${scene.parts[i]} ${sizeWords(size)}`).join("");
    const moving = parts ? `\n${scene.parts.at(-1)} ${sizeWords(Math.max(held - fixed, 0))}` : "";
    const limit = device.limit === null ? "" : `\nlimit ${sizeWords(device.limit)}`;
    return ["memory of device " + device.number, `${sizeWords(held)} at ${timeWords(time, scene)}${parts}${moving}${limit}`];
  }

  function hover(event) {
    const canvas = event.currentTarget, box = canvas.getBoundingClientRect(), x = event.clientX - box.left;
    const inside = x >= left() && x <= box.width - RIGHT;
    const found = inside && describe(data.scenes[canvas.dataset.scene], timeAt(canvas, x), event.clientY - box.top);
    line.style.display = inside ? "block" : "none";
    line.style.left = event.clientX + "px";
    tip.style.display = found ? "block" : "none";
    if (!found) return;
    tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: found[0] }), "\n" + found[1]);
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.min(event.clientY + 16, window.innerHeight - tip.offsetHeight - 8) + "px";
  }

  function leave() {
    tip.style.display = line.style.display = "none";
  }

  function wheel(event) {
    const canvas = event.currentTarget;
    const sideways = event.shiftKey ? event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(event.deltaY / 300), timeAt(canvas, event.clientX - canvas.getBoundingClientRect().left));
    } else if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) {
      event.preventDefault();
      move(sideways / canvas.clientWidth);
    }
  }

  // One pointer drags, two pinch, a click pins.
  const pointers = new Map();

  function pointerDown(event) {
    const canvas = event.currentTarget;
    pointers.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("dragging");
    canvas.moved = pointers.size > 1;
  }

  function pointerMove(event) {
    const canvas = event.currentTarget, before = pointers.get(event.pointerId);
    if (before === undefined) return;
    const others = [...pointers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
    if (Math.abs(event.clientX - before) < 3 && !canvas.moved) return;
    canvas.moved = true;
    leave();
    pointers.set(event.pointerId, event.clientX);
    const perPixel = (view.to - view.from) / (canvas.clientWidth - left() - RIGHT);
    if (!others.length) return show(view.from - (event.clientX - before) * perPixel, view.to - (event.clientX - before) * perPixel);
    const [other] = others, distance = Math.max(Math.abs(event.clientX - other), 10);
    zoom(Math.max(Math.abs(before - other), 10) / distance, timeAt(canvas, other - canvas.getBoundingClientRect().left));
  }

  function pointerUp(event) {
    const canvas = event.currentTarget, box = canvas.getBoundingClientRect();
    pointers.delete(event.pointerId);
    canvas.classList.remove("dragging");
    if (canvas.moved || event.type !== "pointerup") return;
    const { row, i } = hit(data.scenes[canvas.dataset.scene], timeAt(canvas, event.clientX - box.left), event.clientY - box.top);
    if (i < 0) return release();
    const same = view.pinned === row.microBatch[i] && view.selected && view.selected[0] === row && view.selected[1] === i;
    if (same) release(); else select(row, i);
  }

  function select(row, i, pin = true) {
    view.selected = [row, i];
    if (pin) view.pinned = row.microBatch[i];
    const [name, words] = operationWords(row, i);
    status.textContent = `${name}: ${words.replaceAll("\n", ", ")}`;
    if (row.end[i] < view.from || row.start[i] > view.to) {
      const half = (view.to - view.from) / 2, center = (row.start[i] + row.end[i]) / 2;
      show(center - half, center + half);
    }
    redraw();
  }

  function release() {
    view.pinned = view.selected = null;
    status.textContent = "";
    redraw();
  }

  function step(by) {
    const [row, i] = view.selected || [data.scenes[0].rows.find(r => r.compute), by > 0 ? -1 : 0];
    select(row, Math.min(Math.max(i + by, 0), row.length - 1));
  }

  function find() {
    const text = search.value.trim(), scene = data.scenes[0];
    if (!text) return release();
    const operation = text.match(/^(\d+)\s*([A-Za-z_]+)\s*(\d+)$/), numbered = text.match(/^(stage|device)?\s*(\d+)$/i);
    if (operation) {
      const kind = data.kinds.findIndex(k => k.letter.toLowerCase() === operation[2].toLowerCase());
      const there = kind >= 0 && scene.where.get((kind * scene.stages + +operation[1]) * scene.microBatches + +operation[3]);
      if (there && there[0].name(there[1]).toLowerCase() === text.replaceAll(" ", "").toLowerCase()) return goTo(...there);
    } else if (numbered) {
      const [, what, number] = numbered, here = (what || "").toLowerCase();
      if (here === "device" && scene.devices[number]) return toDevice(scene, scene.devices[number]);
      for (const row of scene.rows) if (row.compute)
        for (let i = 0; i < row.length; i++)
          if ((here === "stage" ? row.stage[i] : row.microBatch[i]) === +number && here !== "device") return here ? goTo(row, i) : select(row, i);
    }
    status.textContent = `Nothing is named "${text}": search 2F5, a micro-batch, "stage 3" or "device 1".`;
  }

  function goTo(row, i) {
    const half = Math.max(8 * (row.end[i] - row.start[i]), whole / 1e4), center = (row.start[i] + row.end[i]) / 2;
    show(center - half, center + half);
    toDevice(row.scene, row.scene.devices[row.device]);
    select(row, i);
  }

  function toDevice(scene, device) {
    const top = canvases[scene.number].getBoundingClientRect().top + window.scrollY + device.top;
    window.scrollTo({ top: top - 220 });
    status.textContent = `Device ${device.number}: peak ${sizeWords(device.peak)}.`;
  }

  // A button for each device folds it to its compute lane.
  function buttons() {
    for (const canvas of canvases) {
      const scene = data.scenes[canvas.dataset.scene], stack = canvas.parentElement;
      layOut(scene);
      for (const button of stack.querySelectorAll("button")) button.remove();
      for (const device of scene.devices) {
        const button = document.createElement("button");
        button.textContent = (device.folded ? "▸ " : "▾ ") + (left() < 80 ? "dev. " : "device ") + device.number;
        button.setAttribute("aria-expanded", String(!device.folded));
        button.style.top = device.top + "px";
        button.addEventListener("click", () => {
          device.folded = !device.folded;
          arrange();
          stack.querySelectorAll("button")[device.number].focus();
        });
        stack.append(button);
      }
    }
    const open = data.scenes.some(scene => scene.devices.some(device => !device.folded));
    fold.textContent = open ? "fold" : "unfold";
    fold.title = open ? "Fold every device to its compute lane" : "Show every lane and the memory of every device";
  }

  function arrange() {
    buttons();
    redraw();
  }

  fold.addEventListener("click", () => {
    const folded = fold.textContent === "fold";
    for (const scene of data.scenes) for (const device of scene.devices) device.folded = folded;
    arrange();
  });

  for (const canvas of canvases) {
    canvas.addEventListener("mousemove", hover);
    canvas.addEventListener("mouseleave", leave);
    canvas.addEventListener("wheel", wheel, { passive: false });
    canvas.addEventListener("pointerdown", pointerDown);
    canvas.addEventListener("pointermove", pointerMove);
    canvas.addEventListener("pointerup", pointerUp);
    canvas.addEventListener("pointercancel", pointerUp);
    canvas.addEventListener("dblclick", () => show(first, last));
  }

  // The small map: drag or click moves the window, the wheel zooms.
  const mapTime = event => first + (event.clientX - minimap.getBoundingClientRect().left) / minimap.clientWidth * whole;
  const center = event => {
    const half = (view.to - view.from) / 2, time = mapTime(event);
    show(time - half, time + half);
  };
  minimap.addEventListener("pointerdown", event => { minimap.setPointerCapture(event.pointerId); center(event); });
  minimap.addEventListener("pointermove", event => { if (event.buttons) center(event); });
  minimap.addEventListener("wheel", event => { event.preventDefault(); zoom(Math.exp(event.deltaY / 300), mapTime(event)); }, { passive: false });

  const keys = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => show(first, last),
    ArrowLeft: () => move(-1 / 8), ArrowRight: () => move(1 / 8), n: () => step(1), p: () => step(-1),
    "/": () => search.focus(), Escape: release,
  };
  window.addEventListener("keydown", event => {
    const typing = event.target.matches("input[type=search], textarea, select");
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key] || (typing && event.key !== "Escape")) return;
    event.preventDefault();
    keys[event.key]();
  });
  search.addEventListener("change", find);
  document.getElementById("in").addEventListener("click", keys["+"]);
  document.getElementById("out").addEventListener("click", keys["-"]);
  document.getElementById("fit").addEventListener("click", keys["0"]);
  critical.addEventListener("change", redraw);
  if (differences) differences.addEventListener("change", redraw);

  window.addEventListener("resize", arrange);
  window.addEventListener("scroll", redraw, { passive: true });
  window.addEventListener("beforeprint", () => { view.everything = true; draw(); });
  window.addEventListener("afterprint", () => { view.everything = false; redraw(); });
  themed.push(() => { readTheme(); redraw(); });
  buttons();
  setTheme();
  if (asked && !["dark", "light"].includes(asked)) {
    search.value = asked;
    find();
  }

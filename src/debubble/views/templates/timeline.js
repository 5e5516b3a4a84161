"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvases = [...document.querySelectorAll("canvas")];
  const tip = document.getElementById("tip");
  const line = document.getElementById("line");
  const critical = document.getElementById("critical");
  data.recompute = data.kinds.find(kind => kind.letter === "R");

  // Layout in pixels.
  const LEFT = 74, RIGHT = 12, AXIS = 24, COMPUTE = 24, TRANSFER = 8, MEMORY = 30, GAP = 12;
  const TRANSFER_GAP = 2, LABEL = "11px system-ui, 'DejaVu Sans', sans-serif";

  // One time scale for all scenes.
  const { first, last } = data, whole = last - first;
  let from = first, to = last, frame = 0;

  for (const scene of data.scenes) layOut(scene);

  function layOut(scene) {
    let y = AXIS;
    for (const device of scene.devices) {
      device.top = y;
      device.rows = [];
      for (const [lane, bars] of device.lanes) {
        const height = lane === "compute" ? COMPUTE : TRANSFER;
        device.rows.push({ lane, bars, y, height });
        y += height + TRANSFER_GAP;
      }
      if (device.around.length) {
        device.rows.push({ lane: "around", around: device.around, bars: [], y, height: TRANSFER });
        y += TRANSFER + TRANSFER_GAP;
      }
      device.memoryTop = y;
      y += MEMORY;
      device.bottom = y;
      y += GAP;
    }
    scene.height = y;
    scene.mostMemory = scene.highest * 1.06 || 1;
  }

  function draw() {
    frame = 0;
    canvases.forEach((canvas, i) => drawScene(canvas, data.scenes[i]));
  }

  function redraw() {
    if (!frame) frame = requestAnimationFrame(draw);
  }

  function drawScene(canvas, scene) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.style.height = scene.height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(scene.height * ratio);
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.font = LABEL;
    g.textBaseline = "middle";
    const x = scaleOf(width);
    drawAxis(g, scene, x, width);
    g.save();
    g.beginPath();
    g.rect(LEFT, 0, width - LEFT - RIGHT, scene.height);
    g.clip();
    for (const device of scene.devices) {
      drawBubbles(g, device, x);
      for (const row of device.rows) drawRow(g, row, x);
      drawMemory(g, scene, device, x, width);
    }
    g.restore();
    scene.devices.forEach((device, number) => drawNames(g, scene, device, number));
  }

  function scaleOf(width) {
    const factor = (width - LEFT - RIGHT) / (to - from);
    return time => LEFT + (time - from) * factor;
  }

  function timeAt(canvas, x) {
    return from + (x - LEFT) / (canvas.clientWidth - LEFT - RIGHT) * (to - from);
  }

  function drawAxis(g, scene, x, width) {
    const step = niceStep((to - from) / Math.max(2, (width - LEFT) / 110));
    g.textAlign = "center";
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
      const at = Math.round(x(tick)) + 0.5;
      g.strokeStyle = "#eef0f4";
      g.beginPath(); g.moveTo(at, AXIS - 6); g.lineTo(at, scene.height - GAP); g.stroke();
      g.fillStyle = "#76808f";
      if (at > LEFT - 2 && at < width - 24) g.fillText(timeWords(tick, scene), at, 9);
    }
  }

  function drawBubbles(g, device, x) {
    for (const [start, end, cause] of device.bubbles) {
      if (end < from || start > to) continue;
      g.fillStyle = data.causes[cause].color;
      g.fillRect(x(start), device.top + 1, x(end) - x(start), COMPUTE - 2);
    }
  }

  function drawRow(g, row, x) {
    const tall = row.height === COMPUTE;
    g.fillStyle = data.around;
    for (const [start, end] of row.around || []) {
      if (end >= from && start <= to) g.fillRect(x(start), row.y, Math.max(x(end) - x(start), 0.6), row.height);
    }
    g.textAlign = "center";
    for (const [start, end, kind, , microBatch, chunk, onPath, recompute] of row.bars) {
      if (end < from || start > to) continue;
      const left = x(start), width = x(end) - left;
      g.globalAlpha = tall ? 1 : 0.8;
      g.fillStyle = data.kinds[kind].colors[chunk];
      g.fillRect(left, row.y, Math.max(width > 4 ? width - 1 : width, 0.6), row.height);
      if (recompute && width > 2) {
        g.fillStyle = data.recompute.colors[chunk];
        g.fillRect(left, row.y, Math.max(width - 1, 1) * recompute, row.height);
      }
      if (critical.checked && onPath) {
        g.fillStyle = "#d22f27";
        g.fillRect(left, row.y + row.height - 3, Math.max(width, 1), 3);
      }
      if (tall && width > 7 + 6.5 * String(microBatch).length) {
        g.fillStyle = chunk && chunk >= data.kinds[kind].colors.length / 2 ? "#1f2733" : "#fff";
        g.fillText(microBatch, left + (width - 1) / 2, row.y + row.height / 2 + 0.5);
      }
    }
    g.globalAlpha = 1;
  }

  function drawMemory(g, scene, device, x, width) {
    const floor = device.bottom, y = held => floor - held / scene.mostMemory * (MEMORY - 2);
    g.beginPath();
    g.moveTo(x(0), floor);
    let level = 0;
    for (const [time, held] of device.memory) {
      const at = Math.min(Math.max(x(time), LEFT - 5), width + 5);
      g.lineTo(at, y(level));
      level = held;
      g.lineTo(at, y(level));
    }
    g.lineTo(x(scene.makespan), y(level));
    g.lineTo(x(scene.makespan), floor);
    g.fillStyle = "#c9d8ea";
    g.fill();
    g.strokeStyle = "#6e8fb8";
    g.stroke();
    g.strokeStyle = "#dfe3ea";
    g.beginPath(); g.moveTo(LEFT, floor + 0.5); g.lineTo(width - RIGHT, floor + 0.5); g.stroke();
    if (device.limit === null || device.limit > scene.mostMemory) return;
    const at = Math.round(y(device.limit)) + 0.5;
    g.strokeStyle = "#d22f27";
    g.setLineDash([5, 4]);
    g.beginPath(); g.moveTo(LEFT, at); g.lineTo(width - RIGHT, at); g.stroke();
    g.setLineDash([]);
  }

  function drawNames(g, scene, device, number) {
    g.textAlign = "left";
    g.fillStyle = "#1f2733";
    g.fillText("device " + number, 2, device.top + COMPUTE / 2);
    g.fillStyle = "#98a1ae";
    g.font = "9px system-ui, 'DejaVu Sans', sans-serif";
    g.textAlign = "right";
    for (const row of device.rows) if (row.lane !== "compute") g.fillText(row.lane, LEFT - 6, row.y + row.height / 2);
    g.fillText("memory", LEFT - 6, device.memoryTop + MEMORY / 2);
    g.font = LABEL;
  }

  function niceStep(rough) {
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map(n => n * power).find(step => step >= rough);
  }

  function timeWords(time, scene) {
    const short = number => String(Number(number.toPrecision(5)));
    if (!scene.seconds) return short(time);
    if (time === 0) return "0";
    if (whole >= 2) return short(time) + " s";
    return Math.abs(time) >= 1e-3 || whole > 0.1 ? short(time * 1e3) + " ms" : short(time * 1e6) + " µs";
  }

  function sizeWords(size) {
    if (size >= 2 ** 30) return (size / 2 ** 30).toFixed(2) + " GiB";
    if (size >= 2 ** 20) return (size / 2 ** 20).toFixed(2) + " MiB";
    return String(Number(size.toPrecision(6)));
  }

  // What is under the pointer.
  function describe(scene, time, y) {
    const number = scene.devices.findIndex(d => y >= d.top - GAP / 2 && y < d.bottom + GAP / 2);
    if (number < 0) return null;
    const device = scene.devices[number];
    const row = device.rows.find(r => y >= r.y && y < r.y + r.height + TRANSFER_GAP);
    const hit = row && row.bars.find(([start, end]) => start <= time && time < end);
    if (hit) return operationWords(scene, number, row.lane, hit);
    const phase = row && (row.around || []).find(([start, end]) => start <= time && time < end);
    if (phase) return [phase[2], `device ${number}, around the program\n${span(scene, ...phase)}`];
    if (time < 0 || time > scene.makespan) return null;
    const idle = row && row.lane === "compute" && device.bubbles.find(([start, end]) => start <= time && time < end);
    if (idle) return bubbleWords(scene, number, idle);
    let held = 0;
    for (const [at, size] of device.memory) if (at <= time) held = size;
    const limit = device.limit === null ? "" : `\nlimit ${sizeWords(device.limit)}`;
    return ["memory of device " + number, `${sizeWords(held)} at ${timeWords(time, scene)}${limit}`];
  }

  function operationWords(scene, number, lane, [start, end, kind, stage, microBatch, chunk, , recompute]) {
    const { letter, words } = data.kinds[kind];
    const first = recompute ? ` (recomputing for ${timeWords(recompute * (end - start), scene)})` : "";
    const name = `${stage}${letter}${microBatch}`;
    return [name,
      `${words}${first}\nstage ${stage} (chunk ${chunk}), micro-batch ${microBatch}\ndevice ${number}, ${lane} lane\n` +
      span(scene, start, end) + elsewhere(scene, kind, stage, microBatch)];
  }

  // The same operation in the other scenes: what was predicted beside what was measured.
  function elsewhere(scene, kind, stage, microBatch) {
    return data.scenes.filter(other => other !== scene).map(other => {
      const bars = other.devices.flatMap(device => device.lanes.flatMap(([, bars]) => bars));
      const bar = bars.find(bar => bar[2] === kind && bar[3] === stage && bar[4] === microBatch);
      return bar ? `\n${other.title}: ${timeWords(bar[1] - bar[0], other)}` : "";
    }).join("");
  }

  function bubbleWords(scene, number, [start, end, cause, awaited]) {
    return ["idle: " + data.causes[cause].words,
      `device ${number} waits for ${awaited || "nothing that the program names"}\n${span(scene, start, end)}`];
  }

  function span(scene, start, end) {
    return `${timeWords(start, scene)} to ${timeWords(end, scene)}: ${timeWords(end - start, scene)}`;
  }

  function hover(event) {
    const canvas = event.currentTarget, box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left, found = x >= LEFT && x <= box.width - RIGHT
      && describe(data.scenes[canvas.dataset.scene], timeAt(canvas, x), event.clientY - box.top);
    line.style.display = x >= LEFT ? "block" : "none";
    line.style.left = event.clientX + "px";
    tip.style.display = found ? "block" : "none";
    if (!found) return;
    tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: found[0] }), "\n" + found[1]);
    tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 16, window.innerHeight - tip.offsetHeight - 8) + "px";
  }

  function show(start, end) {
    const length = Math.min(Math.max(end - start, whole / 1e5), whole);
    from = Math.min(Math.max(start, first), last - length);
    to = from + length;
    redraw();
  }

  function zoom(factor, center) {
    show(center - (center - from) * factor, center + (to - center) * factor);
  }

  function wheel(event) {
    const canvas = event.currentTarget;
    const sideways = event.shiftKey ? event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(event.deltaY / 300), timeAt(canvas, event.clientX - canvas.getBoundingClientRect().left));
    } else if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) {
      event.preventDefault();
      const moved = sideways / canvas.clientWidth * (to - from);
      show(from + moved, to + moved);
    }
  }

  function startDrag(event) {
    const canvas = event.currentTarget, perPixel = (to - from) / (canvas.clientWidth - LEFT - RIGHT);
    const x = event.clientX, first = from, last = to;
    const move = e => show(first - (e.clientX - x) * perPixel, last - (e.clientX - x) * perPixel);
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("dragging");
    canvas.addEventListener("pointermove", move);
    canvas.addEventListener("pointerup", () => {
      canvas.removeEventListener("pointermove", move);
      canvas.classList.remove("dragging");
    }, { once: true });
  }

  function leave() {
    tip.style.display = line.style.display = "none";
  }

  for (const canvas of canvases) {
    canvas.addEventListener("mousemove", hover);
    canvas.addEventListener("mouseleave", leave);
    canvas.addEventListener("wheel", wheel, { passive: false });
    canvas.addEventListener("pointerdown", startDrag);
    canvas.addEventListener("dblclick", () => show(first, last));
  }
  const middle = () => (from + to) / 2;
  const keys = {
    "+": () => zoom(0.6, middle()), "=": () => zoom(0.6, middle()), "-": () => zoom(1 / 0.6, middle()),
    "0": () => show(first, last),
    ArrowLeft: () => show(from - (to - from) / 8, to - (to - from) / 8),
    ArrowRight: () => show(from + (to - from) / 8, to + (to - from) / 8),
  };
  window.addEventListener("keydown", event => {
    if (keys[event.key] && !event.ctrlKey && !event.metaKey) keys[event.key]();
  });
  document.getElementById("in").addEventListener("click", keys["+"]);
  document.getElementById("out").addEventListener("click", keys["-"]);
  document.getElementById("fit").addEventListener("click", keys["0"]);
  critical.addEventListener("change", redraw);
  window.addEventListener("resize", redraw);
  draw();
})();

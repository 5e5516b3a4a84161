  // Drawing.  A lane is painted as one line of pixels that is then stretched to the lane's height, so that a hundred
  // thousand operations cost a few milliseconds; text and memory are drawn on top.
  const canvases = [...document.querySelectorAll("canvas[data-scene]")], minimap = document.getElementById("minimap");
  const critical = document.getElementById("critical"), differences = document.getElementById("differences");
  const AXIS = 22, COMPUTE = 22, TRANSFER = 7, GAP = 12, MEMORY = 46, RIGHT = 14, FOLDED_FROM = 12;
  const SLOWER = [178, 24, 43], FASTER = [33, 102, 172];
  const LABEL = "11px system-ui, 'DejaVu Sans', sans-serif", SMALL = "9.5px system-ui, 'DejaVu Sans', sans-serif";
  const view = { from: first, to: last, pinned: null, selected: null, frame: 0, everything: false };
  const left = () => window.innerWidth < 700 ? 62 : 92;
  let colors = {};

  function readTheme() {
    const style = getComputedStyle(document.documentElement);
    const read = name => style.getPropertyValue("--" + name).trim();
    colors = { paper: read("paper"), ink: read("ink"), muted: read("muted"), grid: read("grid"), limit: read("limit") };
    colors.causes = data.causes.map((_, i) => read("cause-" + i));
    colors.causePixels = colors.causes.map(color => pixel(color));
    colors.pixels = data.kinds.map(kind => kind.colors.map(color => pixel(color)));
    colors.pale = data.kinds.map(kind => kind.colors.map(color => pixel(color, 0.22)));
    colors.limitPixel = pixel(colors.limit);
    colors.aroundPixel = pixel(data.around);
    for (const item of document.querySelectorAll("[data-cause]"))
      item.style.background = colors.causes[data.causes.indexOf(item.dataset.cause)];
  }

  function channels(color) {
    return [1, 3, 5].map(at => parseInt(color.slice(at, at + 2), 16));
  }

  /** A color in ImageData's format, mixed with the background if its share is below 1. */
  function pixel(color, share = 1) {
    const paper = channels(colors.paper);
    const [r, g, b] = (typeof color === "string" ? channels(color) : color).map((c, i) => Math.round(c * share + paper[i] * (1 - share)));
    return (255 << 24 | b << 16 | g << 8 | r) >>> 0;
  }

  function layOut(scene) {
    let y = AXIS;
    for (const device of scene.devices) {
      device.folded ??= scene.devices.length > FOLDED_FROM;
      device.top = y;
      device.shown = device.folded ? device.rows.filter(row => row.compute) : device.rows;
      for (const row of device.shown) {
        Object.assign(row, { y, height: row.compute ? COMPUTE : TRANSFER });
        y += row.height + 2;
      }
      device.aroundTop = y;
      if (device.around.length && !device.folded) y += TRANSFER + 2;
      device.memoryTop = y + 2;
      device.bottom = y += device.folded ? 0 : MEMORY + 2;
      y += device.folded ? 4 : GAP;
    }
    scene.height = y + 2;
  }

  const strip = document.createElement("canvas"), stripContext = strip.getContext("2d", { willReadFrequently: true });

  /** Paint one line of pixels per entry and stretch it to the entry's height. */
  function stretch(g, width, lines, x) {
    if (!lines.length || width < 1) return;
    strip.width = width;
    strip.height = lines.length;
    const image = stripContext.createImageData(width, lines.length), pixels = new Uint32Array(image.data.buffer);
    lines.forEach(({ paint }, i) => paint(pixels.subarray(i * width, (i + 1) * width)));
    stripContext.putImageData(image, 0, 0);
    g.imageSmoothingEnabled = false;
    const ratio = window.devicePixelRatio || 1;
    lines.forEach(({ y, height }, i) => g.drawImage(strip, 0, i, width, 1, x, y, width / ratio, height));
  }

  function fill(line, start, end, color, least = 1) {
    const from = Math.max(Math.round(start), 0), to = Math.max(Math.round(end), from + least);
    if (from >= line.length || end < 0) return;
    if (to === from + 1) line[from] = color; else line.fill(color, from, Math.min(to, line.length));
  }

  function paintRow(row, line, scale, from, to) {
    const { chunkOf } = row.scene, ratio = window.devicePixelRatio || 1;
    if (row.compute)
      for (const [start, end, cause] of row.scene.devices[row.device].bubbles)
        if (end > from && start < to) fill(line, (start - from) * scale, (end - from) * scale, colors.causePixels[cause], 0);
    // Of several operations in a pixel the first is drawn, but a pinned one always.
    const { length, start: starts, end: ends, microBatch } = row, { pinned } = view, pixelTime = 1 / scale;
    let painted = -Infinity;
    for (let i = row.after(from); i < length && starts[i] < to; i++) {
      if (ends[i] <= painted && ends[i] - starts[i] < pixelTime && microBatch[i] !== pinned) continue;
      const x = (starts[i] - from) * scale, end = (ends[i] - from) * scale, wide = end - x > 4 * ratio;
      if (end - x < 1) painted = from + (Math.round(x) + 0.5) * pixelTime;
      const palette = pinned === null || microBatch[i] === pinned ? colors.pixels : colors.pale;
      const chunk = chunkOf[row.stage[i]];
      fill(line, x, wide ? end - ratio : end, palette[row.kind[i]][chunk]);
      if (row.recompute.length && row.recompute[i] && end - x > 2)
        fill(line, x, x + (end - x - (wide ? ratio : 0)) * row.recompute[i], palette[RECOMPUTE][chunk]);
    }
  }

  function paintCritical(row, line, scale, from, to) {
    for (let i = row.after(from); i < row.length && row.start[i] < to; i++)
      if (row.critical[i]) fill(line, (row.start[i] - from) * scale, (row.end[i] - from) * scale, colors.limitPixel);
  }

  function paintDifference(row, line, scale, from, to) {
    for (let i = row.after(from); i < row.length && row.start[i] < to; i++) {
      const strength = Math.min(Math.abs(Math.log2(row.ratio[i])), 1);
      const color = pixel(row.ratio[i] > 1 ? SLOWER : FASTER, 0.3 + 0.7 * strength);
      if (strength > 0.03) fill(line, (row.start[i] - from) * scale, (row.end[i] - from) * scale, color);
    }
  }

  function paintAround(device, line, scale, from) {
    for (const [start, end] of device.around) fill(line, (start - from) * scale, (end - from) * scale, colors.aroundPixel);
  }

  function context(canvas, width, height) {
    const ratio = Math.min(window.devicePixelRatio || 1, 16000 / height);
    const w = Math.round(width * ratio), h = Math.round(height * ratio);
    if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
    canvas.style.height = height + "px";
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, height);
    g.textBaseline = "middle";
    return g;
  }

  function draw() {
    view.frame = 0;
    for (const canvas of canvases) drawScene(canvas, data.scenes[canvas.dataset.scene]);
    drawMinimap();
  }

  function redraw() {
    view.frame ||= requestAnimationFrame(draw);
  }

  function scaleOf(width) {
    const origin = left(), from = view.from, factor = (width - origin - RIGHT) / (view.to - from);
    return time => origin + (time - from) * factor;
  }

  function drawScene(canvas, scene) {
    const width = canvas.clientWidth, g = context(canvas, width, scene.height), ratio = window.devicePixelRatio || 1;
    const box = canvas.getBoundingClientRect();
    const visible = scene.devices.filter(d => view.everything
      || (box.top + d.bottom > -600 && box.top + d.top < window.innerHeight + 600));
    const x = scaleOf(width), inner = Math.round((width - left() - RIGHT) * ratio);
    const scale = inner / (view.to - view.from), { from, to } = view;
    drawAxis(g, scene, x, width);
    const lines = [];
    for (const device of visible) {
      for (const row of device.shown) {
        lines.push({ y: row.y, height: row.height, paint: line => paintRow(row, line, scale, from, to) });
        if (critical.checked) lines.push({ y: row.y + row.height - 3, height: 3, paint: line => paintCritical(row, line, scale, from, to) });
        if (row.ratio && differences.checked) lines.push({ y: row.y, height: row.compute ? 5 : 3, paint: line => paintDifference(row, line, scale, from, to) });
      }
      if (device.around.length && !device.folded) lines.push({ y: device.aroundTop, height: TRANSFER, paint: line => paintAround(device, line, scale, from) });
    }
    stretch(g, inner, lines, left());
    g.save();
    g.beginPath();
    g.rect(left(), 0, width - left() - RIGHT, scene.height);
    g.clip();
    for (const device of visible) if (!device.folded) drawMemory(g, scene, device, x, width);
    if (view.pinned !== null) drawWay(g, scene, x);
    for (const device of visible) for (const row of device.shown) if (row.compute) drawNumbers(g, row, x);
    drawSelection(g, scene, x);
    g.restore();
    for (const device of visible) drawNames(g, scene, device);
  }

  function drawAxis(g, scene, x, width) {
    const step = niceStep((view.to - view.from) / Math.max(2, (width - left()) / 110));
    g.font = LABEL;
    g.textAlign = "center";
    for (let tick = Math.ceil(view.from / step) * step; tick <= view.to; tick += step) {
      const at = Math.round(x(tick)) + 0.5;
      g.strokeStyle = colors.grid;
      g.beginPath(); g.moveTo(at, AXIS - 6); g.lineTo(at, scene.height - 2); g.stroke();
      g.fillStyle = colors.muted;
      if (at > left() - 2 && at < width - 26) g.fillText(timeWords(tick, scene), at, 8);
    }
  }

  const NARROWEST = 13.5; // width in pixels that fits a digit

  function drawNumbers(g, row, x) {
    if (x(row.longest) - x(0) < NARROWEST) return;
    g.font = LABEL;
    g.textAlign = "center";
    for (let i = row.after(view.from); i < row.length && row.start[i] < view.to; i++) {
      const start = x(row.start[i]), width = x(row.end[i]) - start;
      if (width < NARROWEST) continue;
      const text = row.label(i);
      if (width < 7 + 6.5 * text.length) continue;
      const here = view.pinned === null || row.microBatch[i] === view.pinned;
      const kind = row.recompute.length && row.recompute[i] > 0.5 ? RECOMPUTE : row.kind[i];
      g.fillStyle = here ? data.kinds[kind].inks[row.scene.chunkOf[row.stage[i]]] : colors.muted;
      g.fillText(text, start + (width - 1) / 2, row.y + row.height / 2 + 0.5);
    }
  }

  /** The memory curve, with at most two points per pixel, and below it the constant parts. */
  function drawMemory(g, scene, device, x, width) {
    const floor = device.bottom, y = held => floor - held / scene.mostMemory * (MEMORY - 2);
    const { times, levels } = device, right = width - RIGHT, end = Math.min(x(scene.makespan), right + 2);
    const pixelTime = (view.to - view.from) / (right - left());
    let at = 0, level = levels[0], low = 0, high = times.length;
    while (low < high) { const m = (low + high) >> 1; if (times[m] <= view.from) low = m + 1; else high = m; }
    at = low;
    if (at > 0) level = levels[at - 1];
    g.beginPath();
    g.moveTo(Math.max(x(0), left() - 2), floor);
    g.lineTo(Math.max(x(0), left() - 2), y(level));
    while (at < times.length && times[at] <= view.to) {
      const px = x(times[at]), until = times[at] + (Math.round(px) + 0.5 - px) * pixelTime;
      g.lineTo(px, y(level));
      let most = level;
      do { level = levels[at++]; most = Math.max(most, level); } while (at < times.length && times[at] < until);
      g.lineTo(px, y(most));
      g.lineTo(px, y(level));
    }
    g.lineTo(end, y(level));
    g.lineTo(end, floor);
    g.closePath();
    g.globalAlpha = 0.85;
    g.fillStyle = data.partColors[scene.parts.at(-1)];
    g.fill();
    g.globalAlpha = 1;
    let below = 0;
    device.static.forEach((size, i) => {
      g.fillStyle = data.partColors[scene.parts[i]];
      const start = Math.max(x(0), left() - 2);
      g.fillRect(start, y(below + size), end - start, y(below) - y(below + size));
      below += size;
    });
    g.strokeStyle = colors.muted;
    g.beginPath(); g.moveTo(left(), floor + 0.5); g.lineTo(right, floor + 0.5); g.stroke();
    const peakAt = x(device.peakAt);
    g.fillStyle = colors.ink;
    g.beginPath(); g.moveTo(peakAt, y(device.peak)); g.lineTo(peakAt - 4, y(device.peak) - 6); g.lineTo(peakAt + 4, y(device.peak) - 6); g.fill();
    if (device.limit === null || device.limit > scene.mostMemory) return;
    const limitAt = Math.round(y(device.limit)) + 0.5;
    g.strokeStyle = colors.limit;
    g.setLineDash([5, 4]);
    g.beginPath(); g.moveTo(left(), limitAt); g.lineTo(right, limitAt); g.stroke();
    g.setLineDash([]);
  }

  /** The path of the pinned micro-batch through the pipeline. */
  function drawWay(g, scene, x) {
    g.strokeStyle = colors.ink;
    g.lineWidth = 1.5;
    g.beginPath();
    way(scene).forEach(([row, i], n) => {
      const at = [x((row.start[i] + row.end[i]) / 2), row.y + row.height / 2];
      if (n) g.lineTo(...at); else g.moveTo(...at);
    });
    g.stroke();
    g.lineWidth = 1;
  }

  function way(scene) {
    if (scene.wayOf !== view.pinned) {
      scene.wayOf = view.pinned;
      scene.way = [];
      for (const row of scene.rows) if (row.compute)
        for (let i = 0; i < row.length; i++)
          if (row.microBatch[i] === view.pinned && COMPUTE_KINDS.has(row.kind[i])) scene.way.push([row, i]);
      scene.way.sort(([a, i], [b, j]) => a.start[i] - b.start[j]);
    }
    return scene.way;
  }

  function drawSelection(g, scene, x) {
    if (!view.selected || view.selected[0].scene !== scene) return;
    const [row, i] = view.selected;
    if (row.y === undefined) return;
    g.strokeStyle = colors.ink;
    g.lineWidth = 2;
    g.strokeRect(x(row.start[i]) - 1, row.y - 1, x(row.end[i]) - x(row.start[i]) + 1, row.height + 2);
    g.lineWidth = 1;
  }

  function drawNames(g, scene, device) {
    if (device.folded) return;
    g.font = SMALL;
    g.textAlign = "right";
    g.fillStyle = colors.muted;
    for (const row of device.shown) if (!row.compute) g.fillText(row.lane, left() - 6, row.y + row.height / 2);
    if (device.around.length) g.fillText("around", left() - 6, device.aroundTop + TRANSFER / 2);
    const y = held => device.bottom - held / scene.mostMemory * (MEMORY - 2);
    g.fillText("0", left() - 6, device.bottom - 2);
    const limited = device.limit !== null && device.limit <= scene.mostMemory;
    const peakY = Math.min(Math.max(y(device.peak), device.memoryTop + (limited ? 14 : 3)), device.bottom - 14);
    const words = (what, size) => (left() < 80 ? "" : what) + sizeWords(size, 1);
    g.fillText(words("peak ", device.peak), left() - 6, peakY);
    if (!limited) return;
    g.fillStyle = colors.limit;
    g.fillText(words("limit ", device.limit), left() - 6, device.memoryTop + 3);
  }

  function niceStep(rough) {
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map(n => n * power).find(step => step >= rough);
  }

  // All compute lanes of all scenes, with a window on what the timelines show.
  function drawMinimap() {
    const rows = data.scenes.flatMap(scene => scene.rows.filter(row => row.compute));
    const each = Math.max(2, Math.min(6, Math.floor(72 / rows.length))), width = minimap.clientWidth;
    const height = rows.length * each, g = context(minimap, width, height), ratio = window.devicePixelRatio || 1;
    const key = [width, ratio, colors.paper, view.pinned].join();
    if (minimap.key !== key) {
      minimap.key = key;
      minimap.picture = document.createElement("canvas");
      const pixels = Math.round(width * ratio);
      Object.assign(minimap.picture, { width: pixels, height });
      const scale = pixels / whole, painted = minimap.picture.getContext("2d");
      painted.setTransform(ratio, 0, 0, 1, 0, 0);
      stretch(painted, pixels, rows.map((row, i) => ({ y: i * each, height: each - (each > 3 ? 1 : 0), paint: line => paintRow(row, line, scale, first, last) })), 0);
    }
    g.imageSmoothingEnabled = false;
    g.drawImage(minimap.picture, 0, 0, width, height);
    const x = time => (time - first) / whole * width;
    g.fillStyle = colors.paper;
    g.globalAlpha = 0.72;
    g.fillRect(0, 0, x(view.from), height);
    g.fillRect(x(view.to), 0, width, height);
    g.globalAlpha = 1;
    g.strokeStyle = colors.ink;
    g.lineWidth = 2;
    g.strokeRect(x(view.from) + 1, 1, Math.max(x(view.to) - x(view.from) - 2, 2), height - 2);
    g.lineWidth = 1;
  }

  // The figures of the page: lanes, look-ups, and the words for times, sizes and operations.
  const data = JSON.parse(document.getElementById("data").textContent);
  const { first, last } = data, whole = last - first;
  const RECOMPUTE = data.kinds.findIndex(kind => kind.letter === "R");
  const COMPUTE_KINDS = new Set(["F", "B", "I"].map(letter => data.kinds.findIndex(kind => kind.letter === letter)));

  class Row {
    constructor(scene, device, lane, columns) {
      Object.assign(this, { scene, device, lane });
      this.start = Float64Array.from(columns.start);
      this.end = Float64Array.from(columns.end);
      this.kind = Uint8Array.from(columns.kind);
      this.stage = Uint16Array.from(columns.stage);
      this.microBatch = Uint32Array.from(columns.microBatch);
      this.recompute = Float32Array.from(columns.recompute);
      this.critical = new Uint8Array(this.start.length);
      for (const i of columns.critical) this.critical[i] = 1;
      this.compute = lane === "compute";
      // Messages overlap on a lane that sends any number at a time: the furthest end so far finds the first to draw.
      this.furthest = Float64Array.from(this.end);
      this.longest = this.start.reduce((most, start, i) => Math.max(most, this.end[i] - start), 0);
      for (let i = 1; i < this.furthest.length; i++) this.furthest[i] = Math.max(this.furthest[i], this.furthest[i - 1]);
    }

    get length() { return this.start.length; }

    /** The first operation that ends after a moment. */
    after(time) {
      let low = 0, high = this.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (this.furthest[middle] <= time) low = middle + 1; else high = middle;
      }
      return low;
    }

    at(time) {
      for (let i = this.after(time); i < this.length && this.start[i] <= time; i++) if (this.end[i] > time) return i;
      return -1;
    }

    key(i) {
      return (this.kind[i] * this.scene.stages + this.stage[i]) * this.scene.microBatches + this.microBatch[i];
    }

    label(i) {
      const { slices } = this.scene, j = this.microBatch[i];
      return slices > 1 ? `${Math.floor(j / slices)}.${j % slices}` : String(j);
    }
    name(i) { return `${this.stage[i]}${data.kinds[this.kind[i]].letter}${this.microBatch[i]}`; }
  }

  data.scenes.forEach((scene, number) => {
    scene.number = number;
    scene.rows = [];
    scene.where = new Map();
    scene.devices.forEach((device, d) => {
      device.number = d;
      device.rows = device.lanes.map(([lane, columns]) => new Row(scene, d, lane, columns));
      device.times = Float64Array.from(device.memory, ([time]) => time);
      device.levels = Float64Array.from(device.memory, ([, level]) => level);
      device.peak = device.levels.reduce((most, level) => Math.max(most, level), 0);
      device.peakAt = device.times[device.levels.indexOf(device.peak)];
      scene.rows.push(...device.rows);
      for (const row of device.rows) for (let i = 0; i < row.length; i++) scene.where.set(row.key(i), [row, i]);
    });
    scene.mostMemory = scene.highest * 1.06 || 1;
  });

  // A measured operation's time over its prediction.
  if (data.differs) {
    const [predicted, measured] = data.scenes;
    for (const row of measured.rows) {
      row.ratio = new Float32Array(row.length).fill(1);
      for (let i = 0; i < row.length; i++) {
        const there = predicted.where.get(row.key(i));
        if (there) row.ratio[i] = (row.end[i] - row.start[i]) / (there[0].end[there[1]] - there[0].start[there[1]]);
      }
    }
  }

  function timeWords(time, scene) {
    const short = number => String(Number(number.toPrecision(5)));
    if (!scene.seconds) return short(time);
    if (time === 0) return "0";
    if (whole >= 2) return short(time) + " s";
    return Math.abs(time) >= 1e-3 || whole > 0.1 ? short(time * 1e3) + " ms" : short(time * 1e6) + " µs";
  }

  function sizeWords(size, digits = 2) {
    if (size >= 2 ** 30) return (size / 2 ** 30).toFixed(digits) + " GiB";
    if (size >= 2 ** 20) return (size / 2 ** 20).toFixed(digits) + " MiB";
    return String(Number(size.toPrecision(6)));
  }

  /** A length of time in the unit that suits it, and not the axis. */
  function lengthWords(time, scene) {
    if (!scene.seconds || time >= 1 || time === 0) return timeWords(time, scene);
    const [scale, unit] = time >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    return `${Number((time * scale).toPrecision(4))} ${unit}`;
  }

  function span(scene, start, end) {
    return `${timeWords(start, scene)} to ${timeWords(end, scene)}: ${lengthWords(end - start, scene)}`;
  }

  function operationWords(row, i) {
    const { scene } = row, { words } = data.kinds[row.kind[i]], time = row.end[i] - row.start[i];
    const again = row.recompute.length && row.recompute[i];
    const recomputing = again ? ` (recomputing for ${lengthWords(again * time, scene)})` : "";
    const chunk = scene.chunkOf[row.stage[i]];
    const elsewhere = data.scenes.filter(other => other !== scene).map(other => {
      const there = other.where.get((row.kind[i] * other.stages + row.stage[i]) * other.microBatches + row.microBatch[i]);
      return there && there[0].name(there[1]) === row.name(i)
        ? `\n${other.title}: ${lengthWords(there[0].end[there[1]] - there[0].start[there[1]], other)}` : "";
    });
    return [row.name(i), `${words}${recomputing}\nstage ${row.stage[i]} (chunk ${chunk}), micro-batch ${row.label(i)}\n`
      + `device ${row.device}, ${row.lane} lane\n${span(scene, row.start[i], row.end[i])}${elsewhere.join("")}`];
  }

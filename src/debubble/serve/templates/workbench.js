"use strict";
const token = new URLSearchParams(location.search).get("token"), page = document.getElementById("page");
const search = document.getElementById("search"), trial = document.getElementById("trial");
const devices = JSON.parse(document.getElementById("devices").textContent);
const path = (name, query = {}) => `/${name}?${new URLSearchParams({ token, ...query })}`;
const POLL = 500, STILL = 120;
let shown = null;

async function ask(name, { query, form } = {}) {
  const options = form === undefined ? {} : { method: "POST", body: JSON.stringify(form) };
  try {
    const response = await fetch(path(name, query), options), answer = await response.json();
    return response.ok ? answer : { error: answer.error };
  } catch {
    return { error: "The workbench does not answer: is `debubble serve` still running?" };
  }
}

function say(form, words) {
  form.querySelector(".error").textContent = words || "";
}

search.addEventListener("submit", async event => {
  event.preventDefault();
  const form = Object.fromEntries(new FormData(search));
  if (form.global_batch) delete form.micro_batches;
  const { number, error } = await ask("search", { form });
  say(search, error);
  if (error === undefined) follow(number, `${form.model} on ${form.cluster}, ${form.planner}`);
});

// A search has a line in the list, which says how far it is, and then what to do with its plan.
async function follow(number, title) {
  const entry = document.getElementById("entry").content.firstElementChild.cloneNode(true);
  const button = name => entry.querySelector(`[data-do=${name}]`), words = entry.querySelector("span");
  entry.querySelector("b").textContent = title;
  const after = ["report", "compare", "plan", "export"].map(button);
  for (const element of after) element.hidden = true;
  button("stop").addEventListener("click", () => ask("stop", { query: { number }, form: {} }));
  button("report").addEventListener("click", () => show(number));
  button("compare").addEventListener("click", () => {
    page.removeAttribute("srcdoc");
    page.src = shown === null || shown === number ? path("report", { number }) : path("compare", { number: shown, other: number });
  });
  button("plan").addEventListener("click", () => { location.href = path("plan", { number }); });
  button("export").addEventListener("change", event => take(number, event.target));
  document.getElementById("searches").prepend(entry);
  for (;;) {
    const { state, lines, error, found } = await ask("search", { query: { number } });
    words.textContent = error || found || lines.at(-1) || "starting ...";
    words.className = error ? "error" : "";
    if (state !== "running") {
      button("stop").hidden = true;
      if (state === "done") {
        for (const element of after) element.hidden = false;
        show(number);
      }
      return;
    }
    await new Promise(resolve => setTimeout(resolve, POLL));
  }
}

function show(number) {
  shown = number;
  page.removeAttribute("srcdoc");
  page.src = path("report", { number });
}

async function take(number, choice) {
  const to = choice.value;
  choice.value = "";
  if (!to) return;
  const response = await fetch(path("export", { number, to }));
  if (!response.ok) return say(search, (await response.json()).error);
  say(search, "");
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(await response.blob()), download: `${to}.zip` });
  link.click();
}

// The sliders: one simulation at a time, and always one for their last place.
let busy = false, again = false, timer = 0;

function memory() {
  const name = search.elements.cluster.value.replace(/^(\d+\s*x\s*)+/, "");
  const device = devices.find(each => each.name === name) || devices.find(each => each.name.startsWith(name));
  return device && (device.gib * trial.elements.memory.value / 100).toFixed(1) + "GiB";
}

function label() {
  const [batches, limit] = trial.querySelectorAll("output");
  batches.textContent = trial.elements.micro_batches.value;
  limit.textContent = memory() || "as the cluster has it";
}

async function simulate() {
  if (busy) { again = true; return; }
  busy = true;
  const { model, cluster, sequence_length, tensor, data } = Object.fromEntries(new FormData(search));
  const { schedule, micro_batches, recompute } = Object.fromEntries(new FormData(trial));
  const form = { model, cluster, sequence_length, tensor, data, schedule, micro_batches, recompute, memory_limit: memory() || "" };
  const { figures, page: content, error } = await ask("trial", { form });
  say(trial, error);
  trial.querySelector(".figures").textContent = figures ? `${figures.step} per step, ${figures.bubble} bubble, ${figures.peak} of ${figures.limit}` : "";
  page.srcdoc = content || "";  // no picture of another configuration next to an error
  busy = false;
  if (again) { again = false; simulate(); }
}

trial.addEventListener("input", () => {
  label();
  clearTimeout(timer);
  timer = setTimeout(simulate, STILL);
});
trial.addEventListener("submit", event => event.preventDefault());
search.elements.cluster.addEventListener("input", label);
// A schedule that is shown follows the model and the devices, too.
search.addEventListener("change", () => {
  const tried = [...trial.querySelectorAll(".figures, .error")].some(element => element.textContent);
  if (tried && page.hasAttribute("srcdoc")) simulate();
});
label();

// The page: a conversation, its composer and its settings.

import { ChatError, chatChunks, servedModels } from "./chat_stream.js";
import { TurnView } from "./turn_view.js";

const KEY = "tide-api-key"; // in sessionStorage, which the browser clears with the tab
const NEAR_END_PX = 80; // a reader who has scrolled further up is left there

const at = (id) => document.getElementById(id);
const messages = []; // the turns so far, as the API takes them
const views = []; // of the turns
let models = [];
let model = null; // one of them
let running = null; // the AbortController of the answer in progress

async function begin() {
  at("key").value = sessionStorage.getItem(KEY) ?? "";
  at("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
  at("settings").addEventListener("submit", (event) => event.preventDefault());
  at("prompt").addEventListener("input", fitPrompt);
  at("prompt").addEventListener("keydown", sendOnEnter);
  document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  at("stop").addEventListener("click", stop);
  at("new").addEventListener("click", newChat);
  at("configure").addEventListener("click", () => showSettings(at("settings").hidden));
  at("key").addEventListener("change", useKey);
  at("colours").addEventListener("change", repaint);
  at("models").addEventListener("change", () => useModel(models.find(({ id }) => id === at("models").value)));
  await loadModel();
}

/** Read which models there are; the one in use stays, if it is still there. */
async function loadModel() {
  try {
    models = await servedModels(at("key").value);
    at("models").replaceChildren(...models.map(({ id }) => new Option(id)));
    at("models").hidden = models.length < 2;
    at("model").hidden = models.length > 1;
    useModel(models.find(({ id }) => id === model?.id) ?? models.find(({ error }) => !error) ?? models[0]);
  } catch (error) {
    showProblem(error);
  }
}

function useModel(chosen) {
  const first = model?.id !== chosen.id;
  model = chosen;
  at("models").value = at("model").textContent = document.title = model.id;
  at("about-depth").hidden = !model.exits;
  if (first) at("colours").checked = Boolean(model.exits); // without exits every token takes all layers
  clearProblem();
  if (model.chat === false) {
    showProblem(new ChatError(`${model.id} has no chat template: it continues texts, which /v1/completions takes.`));
  }
  if (first) repaint();
}

function repaint() {
  document.body.classList.toggle("uncoloured", !at("colours").checked);
  for (const view of views) view.paint(at("colours").checked);
}

function useKey() {
  sessionStorage.setItem(KEY, at("key").value);
  loadModel();
}

async function send() {
  const prompt = at("prompt").value;
  if (running || !prompt.trim() || !at("settings").reportValidity()) return;
  if (!model) await loadModel();
  if (!model) return;
  clearProblem();
  at("empty").hidden = true;
  const question = addTurn("user", "You");
  question.add(prompt);
  question.figures.hidden = true;
  messages.push({ role: "user", content: prompt });
  at("prompt").value = "";
  fitPrompt();
  const answer = addTurn("assistant", model.id);
  await receive(answer);
  if (answer.text) {
    messages.push({ role: "assistant", content: answer.text });
  } else { // the reader can send the message again
    messages.pop();
    for (const view of views.splice(-2)) view.element.remove();
    at("prompt").value ||= prompt;
    fitPrompt();
    at("empty").hidden = messages.length > 0;
  }
}

/** Stream the answer to `messages` into `view`. */
async function receive(view) {
  running = new AbortController();
  setRunning(true, view);
  let note = "", usage;
  try {
    for await (const chunk of chatChunks(requestBody(), at("key").value, running.signal)) {
      usage = chunk.usage ?? usage;
      const [choice] = chunk.choices;
      if (!choice) continue;
      follow(() => view.add(choice.delta.content ?? "", choice.depths, choice.delta.reasoning_content));
      if (choice.finish_reason === "length") note = "ended at the limit of tokens";
    }
  } catch (error) {
    if (error.name === "AbortError") note = "stopped";
    else showProblem(error);
  } finally {
    running = null;
    setRunning(false, view);
    follow(() => view.end(note, usage));
  }
}

function requestBody() {
  const system = at("system").value.trim();
  const body = {
    model: model.id,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true, include_depth: true },
  };
  if (at("temperature").value) body.temperature = at("temperature").valueAsNumber;
  if (at("max-tokens").value) body.max_tokens = at("max-tokens").valueAsNumber;
  return body;
}

function addTurn(role, title) {
  const view = new TurnView(role, title, at("colours").checked);
  views.push(view);
  at("turns").append(view.element);
  view.element.scrollIntoView({ block: "end" });
  return view;
}

function setRunning(on, view) {
  const focused = document.activeElement === at(on ? "send" : "stop");
  at("send").hidden = on;
  at("stop").hidden = !on;
  at("new").disabled = on;
  view.element.classList.toggle("streaming", on);
  at("turns").setAttribute("aria-busy", String(on)); // screen readers read an answer when it is complete
  if (focused) at(on ? "stop" : "prompt").focus();
}

function stop() {
  running?.abort();
}

function newChat() {
  messages.length = views.length = 0;
  at("turns").replaceChildren();
  at("empty").hidden = false;
  loadModel();
  at("prompt").focus();
}

/** Make a change, and keep the end of the conversation in view if it was. */
function follow(change) {
  const view = at("scroll");
  const near = view.scrollHeight - view.scrollTop - view.clientHeight < NEAR_END_PX;
  change();
  if (near) view.scrollTop = view.scrollHeight;
}

function showSettings(on) {
  at("settings").hidden = !on;
  at("configure").setAttribute("aria-expanded", String(on));
}

function showProblem(error) {
  const needsKey = error instanceof ChatError && error.status === 401;
  at("problem").textContent = error instanceof ChatError ? error.message : `The page failed: ${error.message}`;
  at("problem").hidden = false;
  if (needsKey) {
    showSettings(true);
    at("key").focus();
  }
}

function clearProblem() {
  at("problem").hidden = true;
}

function sendOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
}

function fitPrompt() {
  const prompt = at("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

begin();

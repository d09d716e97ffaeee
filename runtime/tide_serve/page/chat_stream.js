// A streamed chat completion: server-sent events over fetch, as the API sends them.

/** A request that failed; `message` is for the reader, `status` is that of HTTP, or 0 where there was no answer. */
export class ChatError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The models, and what the server says about each. Throws ChatError. */
export async function servedModels(key) {
  const response = await call("v1/models", { headers: authorization(key) });
  const { data } = await response.json();
  return data;
}

/** Chunks of the answer to `body`, as objects. Throws ChatError, or AbortError when `signal` is aborted. */
export async function* chatChunks(body, key, signal) {
  const headers = { "Content-Type": "application/json", ...authorization(key) };
  const response = await call("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ChatError(chunk.error.message, response.status);
    yield chunk;
  }
  throw new ChatError("The connection ended before the answer was complete.");
}

function authorization(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Addresses are relative to the page, so that the application can be mounted below another one.
async function call(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ChatError("The server does not answer. Check that it runs and try again.");
  }
  if (!response.ok) throw new ChatError(await errorMessage(response), response.status);
  return response;
}

async function errorMessage(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

/** The `data` of each event. An event is one line here: the API sends one JSON document per event. */
async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // ends the request, where it has not ended
  }
}

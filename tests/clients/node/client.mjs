// The official `openai` package, told what to do and asked what it saw: JSON lines in and out.
//
// In:  {id, url, method, args, headers, maxRetries}   call `client.<method>(...args)`; several may be under way
//      {id, abort: true}                              abort that call by its AbortController
// Out: {id, head: {at, status, retryAfter}}           an HTTP attempt was answered, at that second of this program
//      {id, bytes}                                    of an event stream, before the package reads them
//      {id, chunk}                                    that the package makes of them
//      {id, value} or {id, error}                     how the call ended; nothing follows
// It ends with its stdin.

import { createInterface } from 'node:readline';

import OpenAI from 'openai';
import { Stream } from 'openai/streaming';

const calls = new Map();

function tell(message) {
  process.stdout.write(JSON.stringify(message) + '\n');
}

// The `fetch` that the package uses otherwise, with a report of what passes.
function observed(id) {
  return async (url, init) => {
    const response = await fetch(url, init);
    const retryAfter = response.headers.get('retry-after');
    tell({ id, head: { at: performance.now() / 1000, status: response.status, retryAfter } });
    if (!response.headers.get('content-type')?.startsWith('text/event-stream')) return response;
    const decoder = new TextDecoder();
    const report = new TransformStream({
      transform(piece, controller) {
        tell({ id, bytes: decoder.decode(piece, { stream: true }) });
        controller.enqueue(piece);
      },
    });
    return new Response(response.body.pipeThrough(report), response);
  };
}

async function call({ id, url, method, args, headers, maxRetries }, signal) {
  const client = new OpenAI({ baseURL: url, apiKey: 'any', timeout: 40_000, maxRetries, fetch: observed(id) });
  const path = method.split('.');
  const name = path.pop();
  const owner = path.reduce((resource, part) => resource[part], client);
  const result = await owner[name](...args, { signal, headers });
  if (result instanceof Stream) {
    for await (const chunk of result) tell({ id, chunk });
    return null;
  }
  return typeof result.finalChatCompletion === 'function' ? result.finalChatCompletion() : result;
}

function told(error) {
  const { status, code, param, type, message } = error;
  return { name: error.constructor.name, api: error instanceof OpenAI.APIError, status, code, param, type, message };
}

function begin(request) {
  const controller = new AbortController();
  calls.set(request.id, controller);
  call(request, controller.signal)
    .then((value) => tell({ id: request.id, value }))
    .catch((error) => tell({ id: request.id, error: told(error) }))
    .finally(() => calls.delete(request.id));
}

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  if (request.abort) calls.get(request.id)?.abort();
  else begin(request);
}
process.exit(0);

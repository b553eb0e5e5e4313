// What the openai client for Node.js gets from a server: node openai.mjs URL KEY MODEL writes one JSON object.
// Its fields are checked by test_node.py.
import OpenAI from "openai";

const [url, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url + "/v1", apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const input = messages[0].content;
const schema = {
  type: "object",
  properties: { ok: { type: "boolean" } },
  required: ["ok"],
  additionalProperties: false,
};
const always = { seed: 1, reasoning: { max_tokens: 4 } }; // random weights: the same answers every time
const out = {};

const whole = await client.chat.completions.create({ model, messages, max_tokens: 24, ...always });
out.chat = whole.choices[0].message;
const stream = client.chat.completions.stream({ model, messages, max_tokens: 24, ...always });
out.reasoningDeltas = "";
stream.on("chunk", (chunk) => (out.reasoningDeltas += chunk.choices[0]?.delta.reasoning_content ?? ""));
out.chatStream = (await stream.finalChatCompletion()).choices[0].message;

const logged = await client.chat.completions.create({ model, messages, max_tokens: 4, seed: 1, logprobs: true, top_logprobs: 2 });
out.logprobs = logged.choices[0].logprobs.content;

const form = { type: "json_schema", json_schema: { name: "reply", schema, strict: true } };
const parsed = await client.chat.completions.parse({
  model,
  messages,
  response_format: form,
  ...always,
});
out.structured = parsed.choices[0].message.content;

const reply = { name: "reply", parameters: schema, strict: true };
const called = await client.chat.completions
  .stream({
    model,
    messages,
    tools: [{ type: "function", function: reply }],
    tool_choice: { type: "function", function: { name: "reply" } },
    ...always,
  })
  .finalChatCompletion();
out.toolCalls = called.choices[0].message.tool_calls;
out.finishReason = called.choices[0].finish_reason;

const text = { format: { type: "json_schema", name: "reply", schema } };
const first = await client.responses.create({ model, input, text, ...always });
out.response = first.output_text;
out.responseTypes = [];
const responses = client.responses.stream({
  model,
  input: "And now?",
  previous_response_id: first.id,
  tools: [{ type: "function", ...reply }],
  tool_choice: "required",
  parallel_tool_calls: false,
  ...always,
});
for await (const event of responses) out.responseTypes.push(event.type);
out.responseStream = await responses.finalResponse();

out.errors = {};
for (const [name, body] of Object.entries({
  unknownModel: { model: "no", messages },
  badValue: { model, messages, temperature: 3 },
  badSchema: { model, messages, response_format: { type: "json_schema", json_schema: { name: "a", schema: { type: "no" } } } },
})) {
  try {
    await client.chat.completions.create(body);
  } catch (error) {
    out.errors[name] = [error.constructor.name, error.status, error.param, error.code];
  }
}
try {
  await new OpenAI({ baseURL: url + "/v1", apiKey: "wrong", maxRetries: 0 }).models.list();
} catch (error) {
  out.errors.wrongKey = [error.constructor.name, error.status, error.param, error.code];
}
out.models = (await client.models.list()).data.map((card) => card.id);

console.log(JSON.stringify(out));

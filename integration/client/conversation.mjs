// An agent's conversation with the openai package: ten turns, streamed, with a
// tool call in each, the whole history sent every time.
//
//     node conversation.mjs <base URL> fetch|http2
//
// It prints, as JSON, what each answer's usage said and how many chunks it came in.
import OpenAI from "openai";
import { Agent, fetch } from "undici";

const [baseURL, transport] = process.argv.slice(2);
const turns = 10;

const client = new OpenAI({
	baseURL,
	apiKey: "none",
	maxRetries: 0, // every request counts
	// Node's own fetch speaks HTTP/1.1 only.
	...(transport === "http2" && {
		fetch,
		fetchOptions: { dispatcher: new Agent({ allowH2: true }) },
	}),
});

const tools = [
	{
		type: "function",
		function: {
			name: "read_sensor",
			description: "Reads one sensor of the greenhouse.",
			parameters: {
				type: "object",
				properties: { text: { type: "string", description: "the sensor's name" } },
				required: ["text"],
			},
		},
	},
	{
		type: "function",
		function: {
			name: "set_valve",
			description: "Opens or closes one of the water valves.",
			parameters: {
				type: "object",
				properties: { text: { type: "string", description: "the valve's name and its new state" } },
				required: ["text"],
			},
		},
	},
];

const messages = [
	{
		role: "system",
		content:
			"You look after a greenhouse with twelve beds. Read the sensors before you answer, never guess a value, " +
			"and open a valve only if the soil of its bed is drier than the gardener's limit. " +
			"Limits: tomatoes 35 %, cucumbers 40 %, peppers 30 %, herbs 20 %, seedlings 55 %. " +
			"Answer in two sentences: what you saw, then what you did. ",
	},
];

const answers = [];

// ask sends the history, adds the answer to it and returns the answer.
async function ask(tool_choice) {
	const stream = client.chat.completions.stream({
		model: "simulated",
		messages,
		tools,
		tool_choice,
		stream_options: { include_usage: true },
	});
	let chunks = 0;
	for await (const _ of stream) {
		chunks++;
	}
	const { choices, usage } = await stream.finalChatCompletion();
	answers.push({ chunks, prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details.cached_tokens });
	messages.push(choices[0].message);
	return choices[0].message;
}

for (let turn = 1; turn <= turns; turn++) {
	messages.push({ role: "user", content: `It is hour ${turn}. How is bed ${turn}, and does it need water?` });
	const { tool_calls } = await ask("required");
	for (const call of tool_calls) {
		JSON.parse(call.function.arguments); // throws if the stream lost a part of it
		messages.push({ role: "tool", tool_call_id: call.id, content: `soil ${20 + turn} %, air ${18 + turn} degrees` });
	}
	const { content } = await ask("none");
	if (!content) {
		throw new Error(`turn ${turn} has no answer`);
	}
}
console.log(JSON.stringify(answers));

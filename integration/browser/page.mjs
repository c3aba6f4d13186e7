// Opens the page in Chromium, looks at it and uses it:
//
//     node page.mjs use|survey|states <arguments.json
//
// It fails with what it found wrong, or prints what the caller should know.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { text } from "node:stream/consumers";
import { chromium } from "playwright-core";

const args = JSON.parse(await text(process.stdin));
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

const browser = await chromium.launch({
	executablePath: args.chromium,
	chromiumSandbox: false, // CI is root
	args: ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});

const wide = { width: 1280, height: 800 };

// open returns the page and what went wrong in it so far.
async function open(url, options = {}) {
	const page = await browser.newPage({ viewport: wide, ...options });
	page.setDefaultTimeout(20_000);
	const wrong = [];
	page.on("console", (m) => ["error", "warning"].includes(m.type()) && wrong.push(`console: ${m.text()}`));
	page.on("pageerror", (err) => wrong.push(`error: ${err}`));
	page.on("request", (r) => new URL(r.url()).origin === new URL(url).origin || r.url().startsWith("data:") || wrong.push(`request to ${r.url()}`));
	await page.goto(url);
	return { page, wrong };
}

async function picture(page, name) {
	if (args.screenshots) await page.screenshot({ path: `${args.screenshots}/${name}.png`, fullPage: true });
}

// accessible has axe look at the page, in both colour schemes.
async function accessible(page) {
	await page.evaluate(axe);
	for (const colorScheme of ["light", "dark"]) {
		await page.emulateMedia({ colorScheme });
		const { violations } = await page.evaluate(() => axe.run());
		const found = violations.map((v) => `${v.id} (${v.help}): ${v.nodes.map((n) => `${n.html}: ${n.failureSummary}`).join("; ")}`);
		assert.deepEqual(found, [], `axe, ${colorScheme}`);
	}
	await page.emulateMedia({ colorScheme: "light" });
}

// fits checks that nothing is wider than the window and no text is tiny.
async function fits(page) {
	const [shown, needed, smallest] = await page.evaluate(() => [
		document.documentElement.clientWidth,
		Math.max(document.documentElement.scrollWidth, ...[...document.querySelectorAll("table")].map((t) => t.getBoundingClientRect().right)),
		Math.min(...[...document.querySelectorAll("main *")].filter((e) => e.textContent.trim()).map((e) => parseFloat(getComputedStyle(e).fontSize))),
	]);
	assert(needed <= shown, `the page needs ${needed} pixels of ${shown}`);
	assert(smallest >= 11, `text of ${smallest} pixels`);
}

const row = (page, address) => page.locator(`tr[data-address="${address}"]`);
const state = (page) => page.locator("#state");
const focused = (page) => page.evaluate(() => document.activeElement.textContent);

// Figures are those of the time between two polls.
async function figures(page) {
	const derived = await page.evaluate(() => {
		const upstream = (n) => ({
			address: "a", requests: 10 * n, reasons: { affinity: 9 * n, cold: n }, cached_tokens: 300 * n, reported_prompt_tokens: 400 * n,
			ttft_hit: { count: n, sum_seconds: 0.25 * n }, ttft_miss: { count: 2 * n, sum_seconds: n }, generation: 0, contradicted_ratio: 0, cached_token_reports: 0,
		});
		const replica = new Replica();
		const shown = () => {
			const v = view(replica, true);
			return [v.requests, v.perSecond, v.hitRatio, v.ttftHit, v.ttftMiss, v.reasons.affinity, v.reasons.cold, v.hitLine.length];
		};
		replica.take(0, upstream(5));
		replica.take(5000, upstream(6));
		replica.take(10_000, upstream(7));
		const running = shown();
		replica.take(200_000, upstream(8)); // the page was not looked at
		const back = shown();
		replica.take(201_000, upstream(1)); // Caddy was started anew
		return { running, back, restarted: shown() };
	});
	assert.deepEqual(derived, {
		running: [20, 2, 0.75, 0.25, 0.5, 18, 2, 2],
		back: [0, 0, null, null, null, 0, 0, 0],
		restarted: [0, 0, null, null, null, 0, 0, 0],
	});
}

// What is rare has a word in the replica's row; a drain by the configuration
// has no button that ends it.
async function oddities(page, address) {
	const [name, decisions, actions] = await page.evaluate((address) => {
		const odd = { generation: 2, contradicted_ratio: 0.5, cached_token_reports: 100, drain: { by: "config", since: "2026-01-02T03:04:05Z" } };
		show(performance.now(), views.map(({ now }) => (now.address === address ? { ...now, ...odd } : now)));
		const { cells } = rowOf(address);
		return [cells[0].innerText, cells[7].innerText, cells[8].innerText];
	}, address);
	for (const tag of ["draining, by the configuration", "2 restarts", "reports don't fit its cache size"]) assert(name.includes(tag), name);
	assert.match(decisions, /affinity\s\d+\s%/);
	assert.equal(actions.trim(), "Forget");
}

// Figures change while traffic runs, and lines of TTFT get longer.
async function updates(page) {
	const first = await page.getByRole("table").innerText();
	await page.waitForFunction((first) => document.querySelector("table").innerText !== first, first);
	await page.waitForFunction(() => {
		const points = (kind) => Math.max(...[...document.querySelectorAll(`path.${kind}`)].map((p) => (p.getAttribute("d") ?? "").split("L").length));
		return points("hit") >= 5 && points("miss") >= 3;
	});
	await page.waitForFunction(() => /\d %/.test(document.querySelector("#tiles .figure").textContent));
	await page.waitForFunction(() => /affinity [1-9]/.test(document.querySelector("#legend").innerText));
	await page.locator("tbody td", { hasText: "% in use" }).first().waitFor(); // from the engines' own metrics
	assert.match(await page.locator("#replicas caption").textContent(), /Caddy counts since \d\d:\d\d\./);
}

// Everything can be reached by keyboard, and seen to be.
async function keyboard(page, addresses) {
	await page.evaluate(() => document.activeElement.blur());
	const reached = [];
	for (;;) {
		await page.keyboard.press("Tab");
		const [name, ring] = await page.evaluate(() => {
			const e = document.activeElement;
			const style = getComputedStyle(e);
			return [e === document.body ? "" : e.ariaLabel ?? e.textContent, style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth)];
		});
		if (!name) break;
		assert(ring >= 2, `no focus to be seen on ${name}`);
		reached.push(name);
	}
	assert.deepEqual(reached, [
		"Pause", "Who holds this prompt?",
		"Replica", "Hit ratio", "Requests", "In flight", "To prefill", "TTFT", "Cache", "Decisions",
		...addresses.flatMap((a) => [`Drain ${a}`, `Forget what ${a} holds`]),
	]);
}

// Sorting is told, and leaves the focus where it is.
async function sorting(page) {
	const hitRatio = page.getByRole("columnheader", { name: "Hit ratio" });
	await hitRatio.getByRole("button").focus();
	await page.keyboard.press("Enter");
	assert.equal(await hitRatio.getAttribute("aria-sort"), "descending");
	await page.keyboard.press("Enter");
	assert.equal(await hitRatio.getAttribute("aria-sort"), "ascending");
	assert.equal(await focused(page), "Hit ratio");
	const ratios = (await page.locator("tbody td:nth-child(2)").allInnerTexts()).map(parseFloat).filter((n) => !isNaN(n));
	assert.deepEqual(ratios, ratios.toSorted((a, b) => a - b));
}

// Drain, undrain and forget by keyboard; the row keeps the focus.
async function actions(page, address) {
	await row(page, address).getByRole("button").first().focus();
	await page.keyboard.press("Enter");
	await page.getByRole("button", { name: `Undrain ${address}` }).waitFor();
	assert.match(await row(page, address).innerText(), /draining since \d/);
	assert.match(await page.locator("#said").textContent(), /gets no new conversations/);
	assert.equal(await focused(page), "Undrain");
	await page.keyboard.press("Enter");
	await page.getByRole("button", { name: `Drain ${address}` }).waitFor();
	await row(page, address).getByText("draining").waitFor({ state: "detached" });

	const forget = page.getByRole("button", { name: `Forget what ${address} holds` });
	await forget.click();
	await page.getByRole("dialog").waitFor();
	await page.keyboard.press("Escape"); // is no
	await page.getByRole("dialog").waitFor({ state: "hidden" });
	assert.equal(await focused(page), "Forget");
	await forget.click();
	await page.getByRole("dialog").getByRole("button", { name: "Forget" }).click();
	await page.locator("#said", { hasText: `${address} is believed to hold nothing.` }).waitFor();
}

// A lookup finds the holder of a body, and says why there is none.
async function lookup(page, body, holder) {
	const answer = page.locator("#answer");
	await page.getByText("Who holds this prompt?").focus();
	await page.keyboard.press("Enter");
	await page.getByLabel("The JSON body of a request").fill(body);
	await page.getByRole("button", { name: "Look up" }).click();
	await answer.getByRole("row", { name: holder }).waitFor();
	const [address, matched] = await answer.locator("tbody tr").first().locator("th, td").allInnerTexts();
	assert.equal(address, holder);
	assert(parseInt(matched.replace(",", "")) > 900, `${matched} tokens of 1,000`);
	assert.equal(await answer.getByText("yes:").count(), 1);
	await fits(page);
	await accessible(page);
	await picture(page, "lookup");
	await page.getByRole("button", { name: "Clear" }).click();
	assert.equal((await answer.textContent()) + (await page.locator("#body").inputValue()), "");
	await page.locator("#body").fill("nonsense");
	await page.getByLabel("Tenant").fill("Bearer key");
	const asked = page.waitForRequest(/lookup/);
	await page.getByRole("button", { name: "Look up" }).click();
	await answer.getByText("No prompt to go by").waitFor();
	const request = await asked;
	assert.equal(await request.headerValue("Authorization"), "Bearer key");
	assert(!/key/.test(request.url()), `the tenant is in ${request.url()}, which Caddy logs`);
	await page.getByText("Who holds this prompt?").click();
}

// Paused, the page asks for nothing.
async function pause(page) {
	await page.getByRole("button", { name: "Pause" }).click();
	assert.equal(await state(page).textContent(), "paused");
	const asked = [];
	const note = (r) => asked.push(r.url());
	page.on("request", note);
	await page.waitForTimeout(2500);
	page.off("request", note);
	assert.deepEqual(asked, []);
	await page.getByRole("button", { name: "Pause" }).click();
	await page.waitForFunction(() => document.querySelector("#state").textContent === "live");
}

// The last replica that is not draining needs a second word.
async function force(page, addresses) {
	const [last, ...others] = addresses;
	for (const address of others) {
		await page.getByRole("button", { name: `Drain ${address}` }).click();
		await page.getByRole("button", { name: `Undrain ${address}` }).waitFor();
	}
	const button = page.getByRole("button", { name: `Drain ${last}` });
	await button.click();
	await page.getByRole("dialog").getByText("the last replica that is not draining").waitFor();
	await accessible(page);
	await page.keyboard.press("Enter"); // Cancel has the focus
	assert.equal(await button.count(), 1);
	await button.click();
	await page.getByRole("dialog").getByRole("button", { name: "Drain it too" }).click();
	for (const address of addresses) {
		await page.getByRole("button", { name: `Undrain ${address}` }).click();
		await page.getByRole("button", { name: `Drain ${address}` }).waitFor();
	}
}

// pictures are for people: they show the page when it has run for a while.
async function pictures(page) {
	if (!args.screenshots) return;
	await page.getByRole("columnheader", { name: "Replica" }).getByRole("button").click();
	await page.mouse.move(0, 0);
	await page.waitForTimeout(90_000);
	await picture(page, "light");
	await page.emulateMedia({ colorScheme: "dark" });
	await picture(page, "dark");
	await page.emulateMedia({ colorScheme: "light" });
}

const modes = {
	async use() {
		const { page, wrong } = await open(args.url);
		await page.getByRole("button", { name: /^Drain / }).nth(7).waitFor();
		assert.equal(await state(page).textContent(), "live");
		const addresses = await page.locator("tbody tr").evaluateAll((rows) => rows.map((r) => r.dataset.address));
		assert.equal(addresses.length, 8);
		const [odd, , drained] = addresses;
		await figures(page);
		await oddities(page, odd);
		await updates(page);
		await keyboard(page, addresses);
		await sorting(page);
		await lookup(page, args.body, args.holder);
		await actions(page, drained);
		await pause(page);

		await page.getByRole("button", { name: `Drain ${drained}` }).click();
		await page.getByRole("button", { name: `Undrain ${drained}` }).waitFor();
		await fits(page);
		await pictures(page);
		await page.setViewportSize({ width: 400, height: 800 });
		const narrow = await page.evaluate(() => document.documentElement.scrollWidth);
		assert(narrow <= 400, `${narrow} pixels in a window of 400`);
		await page.setViewportSize(wide);
		assert.deepEqual(wrong, []);

		await force(page, addresses.filter((a) => a !== drained));
		assert.deepEqual(wrong.filter((w) => !/status of 409/.test(w)), []); // Chromium logs the refusals
		return { drained };
	},

	async survey() {
		const { page, wrong } = await open(args.url);
		await page.waitForFunction((n) => document.querySelectorAll("#replicas tbody tr").length === n, args.replicas);
		await page.waitForFunction(() => Math.max(...[...document.querySelectorAll("path.hit")].map((p) => (p.getAttribute("d") ?? "").split("L").length)) >= 5);
		await fits(page);
		await accessible(page);
		await picture(page, "many");
		const highest = () => page.locator("tbody tr").evaluateAll((rows) => Math.max(...rows.map((r) => r.getBoundingClientRect().height)));
		assert((await highest()) <= 48, `a row is ${await highest()} pixels high`);
		// Names may be long.
		await page.evaluate(() => show(performance.now(), views.map(({ now }, i) => ({ ...now, address: `vllm-decode-${i}.vllm-headless.inference.svc.cluster.local:8000` }))));
		await fits(page);
		assert((await highest()) <= 64, `a row is ${await highest()} pixels high`);
		// The head stays in sight.
		await page.evaluate(() => window.scrollTo(0, document.body.scrollHeight));
		assert.equal(await page.locator("thead").evaluate((head) => head.querySelector("th").getBoundingClientRect().top), 0);
		assert.deepEqual(wrong, []);
		return {};
	},

	// states opens pages, by what they should say is the matter.
	async states() {
		const { chromium, screenshots, ...pages } = args;
		for (const [text, url] of Object.entries(pages)) {
			const { page } = await open(url);
			await page.getByText(text).waitFor();
			assert.equal(await page.getByRole("table").count(), 0);
			await accessible(page);
			await page.close();
		}
		return {};
	},
};

try {
	process.stdout.write(JSON.stringify(await modes[process.argv[2]]()));
} finally {
	await browser.close();
}

// A browser with a report in it, as a user has it: a file on the disk, and no network.

import { existsSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { delimiter, join } from "node:path";
import { pathToFileURL } from "node:url";
import { type Browser, type BrowserContextOptions, chromium, type Page } from "playwright-core";
import { pack } from "./encode.ts";
import { fillPage, template } from "./page.ts";
import { dataOf, type Recording } from "./recording.ts";

export class Session {
  readonly #directory = mkdtempSync(join(tmpdir(), "lowtide-report-"));
  readonly #browser: Browser;
  /** What the pages said that nobody should have to read: errors, warnings, and requests that were made. */
  readonly complaints: string[] = [];

  constructor(browser: Browser) {
    this.#browser = browser;
  }

  static async start(): Promise<Session> {
    const inPath = (process.env.PATH ?? "").split(delimiter).map((directory) => join(directory, "chromium"));
    const executablePath = process.env.CHROMIUM ?? inPath.find((path) => existsSync(path));
    if (executablePath === undefined) throw new Error("no chromium in PATH; CHROMIUM may name another");
    return new Session(await chromium.launch({ executablePath, args: ["--no-sandbox"] }));
  }

  /** Opens a report of these recordings. */
  async open(recordings: Recording[], fragment = "", options: BrowserContextOptions = {}): Promise<Page> {
    const { summary, columns } = dataOf(recordings);
    return this.openText(fillPage(template(), summary, pack(columns)), fragment, options);
  }

  async openText(text: string, fragment = "", options: BrowserContextOptions = {}): Promise<Page> {
    const path = join(this.#directory, `${Math.random().toString(36).slice(2)}.html`);
    writeFileSync(path, text);
    return this.openFile(path, fragment, options);
  }

  newPage(options: BrowserContextOptions = {}): Promise<Page> {
    return this.#browser.newPage({ viewport: { width: 1280, height: 900 }, ...options });
  }

  async openFile(path: string, fragment = "", options: BrowserContextOptions = {}): Promise<Page> {
    const page = await this.newPage(options);
    page.on("console", (message) => this.complaints.push(`${message.type()}: ${message.text()}`));
    page.on("pageerror", (error) => this.complaints.push(`error: ${error.message}`));
    page.on("request", (request) => {
      if (!/^(file|data):/.test(request.url())) this.complaints.push(`request: ${request.url()}`);
    });
    await page.goto(pathToFileURL(path).href + fragment);
    await settled(page);
    return page;
  }

  async stop(): Promise<void> {
    await this.#browser.close();
    rmSync(this.#directory, { recursive: true, force: true });
  }
}

/** Waits until every view shows the state as it is. */
export async function settled(page: Page): Promise<void> {
  await page.waitForFunction(
    () =>
      document.querySelector(".failed, #tables table") !== null &&
      document.querySelector("[aria-busy]") === null,
  );
}

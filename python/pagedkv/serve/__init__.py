"""The HTTP server: an aiohttp application in front of `AsyncLLM`, in the shapes of OpenAI's API.

`__main__` starts it, `app` puts it together, `protocol` decides what a request may say, `generation` runs
it on the engine, and `completions` and `chat` write the answers. Everything here lives on one asyncio
thread; the engine has its own.
"""

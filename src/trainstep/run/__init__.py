"""Any training script under hooks: where its steps begin and end, what each consists of, and what its host waits for.

The script runs unmodified in a process of its own (`script`), under hooks on torch that tell what begins and ends
(`watch/`). What is known goes to a log on disk at once, so that it survives however the script ends; the process that
started it (`supervise`) makes rows of all ranks' logs (`rows`).
"""

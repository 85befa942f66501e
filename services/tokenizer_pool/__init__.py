"""Tokenizer pool: text and chat messages to token ids and KV block hashes, and ids to text; grammars are checked here.

The service process (`TokenizerPool`) hands jobs to sets of `JobWorkers`. Each is a fork server with its workers,
which are replaced when a job breaks its limits of CPU time and memory, or when they end. Text workers share one
loaded tokenizer, and run templates of clients in a sandbox; `TextCodec` does the work, of many texts at once
`TextBatches`, and knows nothing of processes; `AdapterCodecs` has one for each adapter with a tokenizer of its own.
Grammar workers share an engine: each engine has its own (`EngineWorkers`), which start when they are needed, and
`GrammarChecks` asks them; a prompt goes to a text worker once its grammar is taken. In each set tenants take turns, and
long jobs leave a worker to quick ones (`workers/`).
"""

"""rdtexec inside vLLM: the worker's engine, the trainer's engine, and the plugin that registers both."""

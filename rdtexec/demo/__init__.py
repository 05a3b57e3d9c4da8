"""The demo: two trainer ranks, two real vLLM workers, three syncs over each transport, every byte checked."""

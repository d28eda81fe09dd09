"""Experts: slime's router on packed sequences, replay of expert choices, and what a step tells of the router."""

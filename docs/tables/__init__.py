"""The tables of README.md and docs/*.md, one file per subject, made from docs/results/."""

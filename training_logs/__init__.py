"""What a run writes: logs, CSVs, summary, plots."""

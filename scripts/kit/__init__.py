"""What the programs share: workers with limits, records, output files, facts of the machine."""

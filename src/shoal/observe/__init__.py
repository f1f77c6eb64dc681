"""Views derived from the journal: live console, status, ledger of wall time, curves, report. No torch."""

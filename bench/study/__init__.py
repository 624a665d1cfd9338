"""What `bench/async_study.py` and `bench/distbelief_figures.py` are made of.

    subject ──▶ methods ──▶ runs ──▶ ledger ──▶ findings ──▶ page, plots

A model and machines; ways to train it; one run as a row; rows in a file; figures of rows; what a reader sees.
"""

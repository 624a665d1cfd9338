"""What `studies/large_batch_study/large_batch_study.py` is made of.

    ledger ──▶ minima, critical, saddles ──▶ page, plots

Runs as lines of a file; models that are trained with large batches; steps to a loss; ways out of a saddle; what a
reader sees. The last three say what is to be run, run it, and make figures of the rows.
"""

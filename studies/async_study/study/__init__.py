"""What `studies/async_study/async_study.py` is made of.

    subject, methods ──▶ scenes ──▶ runs ──▶ ledger ──▶ findings ──▶ page, plots

Models, data and machines; ways to train; which of them meet on which machines; one run as a row; rows in a
file, and what is due; figures of rows; what a reader sees.
"""

"""Learning to draft: an adapter on the rows that draft is trained on the job's own answers.

No draft changes a text of a causal model, so the adapter may be any and may change at any moment. `learning.Learning`
is what a stranger may call; it needs a model and `Answers`.
"""

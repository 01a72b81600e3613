"""Learning to draft: an adapter for the rows that draft is trained on the job's own answers.

No draft changes a text of a causal model, so the adapter may be any, and may change at any moment. Code outside this
package calls `learning.Learning`, which needs a model and `Answers`.
"""

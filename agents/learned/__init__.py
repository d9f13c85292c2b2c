"""Learned planners: the policy, the DQN over edits of whole plans, the paper's DQN, structure2vec."""

"""The two published configurations of AdLoCo, as their authors wrote them, without comments.

Source: github.com/funmagster/AdLoCo, commit e976387: config.yaml, and the block "Config" of README.md.
"""

CONFIG = """
project_name: 'Multi instance training'
task_name: 'AdLoCo'
training_seed: 42
CUDA_VISIBLE_DEVICES: "3"
log_dir: "logs"
log_file: "training_log.log"
memory_report_dir: "memory_report"
model_training_report_dir: "model_training_report"
model_weights_dir: "model_weights"
dataset: "c4"
data_sample_size: 2048
val_size: 100
samples_per_class: 500
c4_language: "en"
c4_streaming: true
c4_tokenized_path: /home/shared/mit/c4_en_3645042_tokenized
model_type: 'microllama'
model_config: {"name": "keeeeenw/MicroLlama", pretrained=True}
num_outer_steps: 20
lr_inner: "2e-5"
lr_outer: "0.5"
lr_sgd: "2e-5"
nodes_per_gpu: 4
num_init_trainers: 4
num_inner_steps: 200
save_weights_every: 4
initial_batch_size: 1
distributed_algo: "DiLoCo"
padding_percentage: 0.9
single_seed: true
need_to_reinit_output_layers: true
merging_policy: "worst_with_worst"
merge_frequency: 2
sampling_method: "augmented_inner_product_test"
switch_mode: "threshold_switch_mode"
ETA: 0.8
vartheta: 0.01
nu: 0.3
"""

README = """
training_seed: 42
CUDA_VISIBLE_DEVICES: "1,3"
devices: ["cuda:1"]
real_device_ids: ['4']
log_dir: "logs"
log_file: "training_log.log"
memory_report_dir: "memory_report"
model_training_report_dir: "model_training_report"
model_weights_dir: "model_weights"
dataset: "c4"
data_sample_size: 2048
model_type: 'microllama'
model_config: {"name": "keeeeenw/MicroLlama"}
number_of_training_epochs: 2
learning_rate_for_inner_opt: 1e-5
learning_rate_for_outer_opt: 1e-4
nodes_per_gpu: 4
number_of_initial_trainers: 4
number_of_inner_steps_between_outers: 5
INITIAL_BATCH_SIZE: 3
ETA: 0.1
vartheta: 0.01
nu: 0.15
sampling_method: "norm_test"
distributed_algo: "LocalSGD"
padding_percentage: 0.85
"""

# Values of one machine, which the files in configs/ leave out.
MACHINE = ("CUDA_VISIBLE_DEVICES", "devices", "real_device_ids", "c4_tokenized_path")

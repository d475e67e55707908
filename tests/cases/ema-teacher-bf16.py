"""A self-distillation teacher follows its student by 5e-4 a step: stored in bf16 most of its weights never follow."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "ema-teacher-bf16",
    "source": "d8ahazard/sd_dreambooth_extension#1415, d8ahazard/sd_dreambooth_extension#1417, PaddlePaddle/PaddleMIX#515",
    "mechanism": "0.0005 * (student - teacher) is under half a bf16 spacing of the teacher's weight",
    "kind": "state",
    "expect": "keep the weights of teacher in fp32: a decay of 0.9995 needs steps finer than 2**-9",
    "formats": {}, "flag_sites": [], "fix_sites": [],
}
DECAY = 0.9995


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inward, self.norm = nn.Linear(24, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 16)

    def forward(self, x):
        x = self.inward(x)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


class SelfDistillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Encoder(), Encoder()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.mul_(DECAY).add_(fast, alpha=1 - DECAY)

    def forward(self, first, second):
        self.follow()
        return self.student(first), self.teacher(second)


def batches():
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(6, 24, generator=generator)
    for _ in range(8):
        topic = torch.randn(64, 6, generator=generator) @ mix / 2
        yield tuple(topic + 0.5 * torch.randn(64, 24, generator=generator) for _ in range(2))


def loss(model, batch):
    student, teacher = model(*batch)
    return -(F.softmax(teacher.float() / 0.05, -1) * F.log_softmax(student.float() / 0.1, -1)).sum(-1).mean()


def workload():
    return autoprec.Workload(
        model=SelfDistillation,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD([p for p in params if p.requires_grad], lr=0.05),
    )


def trained(teacher_dtype, steps=110):
    """Distance that student and teacher have gone from their common start."""
    torch.manual_seed(0)
    model = SelfDistillation()
    model.teacher.to(teacher_dtype)
    start = torch.cat([p.detach().flatten() for p in model.student.parameters()])
    optimizer, data = workload().optimizer(model.parameters()), list(batches())
    for step in range(steps):
        first, second = data[step % len(data)]
        optimizer.zero_grad()
        loss(lambda a, b: (model.follow(), (model.student(a), model.teacher(b.to(teacher_dtype))))[1], (first, second)).backward()
        optimizer.step()
    gone = [torch.cat([p.detach().float().flatten() for p in net.parameters()]) - start.to(dtype).float()
            for net, dtype in ((model.student, torch.float32), (model.teacher, teacher_dtype))]
    return gone[0].norm().item(), gone[1].norm().item()


def verify():
    student, teacher = trained(torch.float32)
    low_student, low_teacher = trained(torch.bfloat16)
    return {
        "the student moves in both runs": min(student, low_student) > 0.5,
        "fp32: the teacher follows": teacher > 0.01 * student,
        "bf16: it makes less than half of that way": low_teacher / low_student < 0.5 * teacher / student,
    }

{{/* Names and labels of objects. */}}

{{- define "batchllm.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "batchllm.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "batchllm.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "batchllm.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
app.kubernetes.io/name: batchllm
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
{{- end -}}

{{/* Account of GPU pods, or with the argument "cpu" of plan pods. */}}
{{- define "batchllm.serviceAccountName" -}}
{{- $account := (index .root.Values .kind).serviceAccount -}}
{{- if $account.name -}}
{{- $account.name -}}
{{- else if $account.create -}}
{{- printf "%s-%s" (include "batchllm.fullname" .root) .kind -}}
{{- else -}}
{{- fail (printf "%s.serviceAccount: give the name of an account, or create: true" .kind) -}}
{{- end -}}
{{- end -}}

{{- define "batchllm.priorityClassName" -}}
{{- if .Values.priorityClass.name -}}
{{- .Values.priorityClass.name -}}
{{- else if .Values.priorityClass.create -}}
{{- printf "%s-batch" (include "batchllm.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "batchllm.modelClaimName" -}}
{{- default (printf "%s-models" (include "batchllm.fullname" .)) .Values.modelCache.existingClaim -}}
{{- end -}}
